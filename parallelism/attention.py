"""Attention in pieces: over some of the keys at a time, with what it takes to put the pieces together exactly.

Torch's fused kernels return, beside the output, the log of each query's sum of exponentials. Outputs over disjoint keys
are then averaged with weights exp(lse_i - lse), and the gradients of a piece follow from the whole's output and lse
(Dao 2023, section 3.1; Liu et al. 2023, section 3).

q (B, H, T, D), k and v (B, K, S, D), where K divides H: grouped heads move and stay unrepeated. lse is (B, H, T).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """Some queries looking at some keys; causal: the i-th query at the first i + 1 keys only."""

    queries: slice
    keys: slice
    causal: bool


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The output (B, H, T, D) and lse of one piece."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What this piece adds to the gradients of q, k and v; out and lse are those of the whole."""
    lse = lse.contiguous()  # CUDA's kernel reads it as if it were, and says nothing
    if q.is_cuda:
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # without dropout no random state is read
        return aten._scaled_dot_product_flash_attention_backward(
            *(gradient, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)
        )
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, q, k, v, out, lse, 0.0, causal)


class Merged:
    """The output of a query's pieces so far, in at least float32."""

    def __init__(self, q: Tensor) -> None:
        exact = torch.promote_types(q.dtype, torch.float32)
        self.out = torch.zeros_like(q, dtype=exact)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=exact, device=q.device)

    def add(self, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Attends to one more piece; q is whole, k and v are what `piece.keys` counts in."""
        out, lse = attend(q[:, :, piece.queries], k[:, :, piece.keys], v[:, :, piece.keys], piece.causal)
        so_far = self.lse[:, :, piece.queries]
        together = torch.logaddexp(so_far, lse)
        old, new = (so_far - together).exp().unsqueeze(-1), (lse - together).exp().unsqueeze(-1)
        self.out[:, :, piece.queries] = self.out[:, :, piece.queries] * old + out * new
        self.lse[:, :, piece.queries] = together
