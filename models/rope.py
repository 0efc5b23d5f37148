"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1.

B batch, T time, H heads, D head width. Pairs are (i, i + D/2), the half-split convention of transformers' Llama,
so its checkpoints need no permutation.
"""

import math

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cos and signed sin, each (T, 1, D) float32


def frequencies(head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair, (D/2,) float32: theta^(-2i/D)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponents


def scale_frequencies(freqs: Tensor, factor: float, low_freq: float, high_freq: float, original: int) -> Tensor:
    """Stretch the slow pairs by `factor`, so that more than `original` tokens fit in the angles seen there.

    A pair that turns more than `high_freq` times in `original` tokens is kept, one that turns less than `low_freq`
    times is slowed `factor` times, and between them the two are mixed linearly in the number of turns. Source:
    Llama 3.1's reference code (apply_scaling), the same as rope_type "llama3" in transformers. (D/2,) to (D/2,).
    """
    turns = freqs * (original / (2 * math.pi))
    keep = ((turns - low_freq) / (high_freq - low_freq)).clamp(0.0, 1.0)
    return freqs * (keep + (1.0 - keep) / factor)


def make_rotation(positions: Tensor, freqs: Tensor) -> Rotation:
    """What `rotate` needs for these positions, (T,) int64: cosine and sine, each (T, 1, D) float32.

    The first half of the sine is negated here, once, rather than half of every q and k in every block.
    """
    angles = positions.float().unsqueeze(1) * freqs  # (T, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)  # (T, 1, D)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair of x, (B, T, H, D), by its position's angle; worked out in float32, returned in x's dtype.

    roll swaps the halves in one copy; splitting and joining them took 10 to 40% longer on a CPU.
    """
    cos, sin = rotation
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).type_as(x)  # (B, T, H, D)
