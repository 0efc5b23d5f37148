"""Context parallel: each rank holds T/cp tokens of every sequence, and only attention brings the ranks together.

Three ways to let each query see the keys of other ranks, all exact:

    ring       k and v travel from rank to rank, while attention works on those that are here (Liu et al. 2023)
    allgather  every rank gathers k and v, and attends with its own queries (Llama 3, section 3.3.2)
    ulysses    an all-to-all trades tokens for heads, before and after (Jacobs et al. 2023)

For ring and allgather the sequence is cut into 2 cp chunks, of which rank r has the r-th and the r-th from the end
(zigzag): causal attention then costs every rank the same. For ulysses rank r has the r-th of cp parts.

Shapes as in models/gpt.py, with t = T/cp tokens and c = t/2 in a chunk; n is cp.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from models.gpt import GPT, Block
from parallelism.attention import Merged, Piece, attend_backward
from parallelism.collectives import all_gather, exchange, reduce_scatter

TIME = 2  # the dimension of tokens in (B, H, T, D)


def apply_cp(model: GPT, mesh: DeviceMesh, *, method: str = "ring") -> None:
    """Replaces the attention core of every block, in place; the mesh has one axis.

    The model is then to be called with the tokens at `own_positions` and with those positions.
    """
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.core = CORES[method](mesh.get_group(), block.attention.core)


def own_positions(seq_len: int, rank: int, num_ranks: int, method: str) -> Tensor:
    """Where in the sequence a rank's tokens stand, (t,) int64. The length has to divide by cp, for zigzag by 2 cp."""
    if method == "ulysses":
        return torch.arange(seq_len).chunk(num_ranks)[rank]
    chunks = torch.arange(seq_len).chunk(2 * num_ranks)
    return torch.cat((chunks[rank], chunks[2 * num_ranks - 1 - rank]))


class InPieces(nn.Module):
    """An attention core that works on pieces, through a Function of q, k, v and the group."""

    def __init__(self, function: type[Function], group: ProcessGroup) -> None:
        super().__init__()
        self.function, self.group = function, group

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As AttentionCore, for t tokens."""
        return self.function.apply(q, k, v, self.group)


class Ring(Function):
    """k and v go round the ranks; at most two blocks of them are here at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        merged = Merged(q)
        here = torch.stack((k, v))  # (2, B, K, t, D)
        for step in range(group.size()):
            arriving = pass_on(here, group) if step < group.size() - 1 else None
            merged.add(ring_piece(group, step, q.shape[TIME]), q, here[0], here[1])
            here = arriving() if arriving else here
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        group, num_ranks = ctx.group, ctx.group.size()
        exact = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=exact)
        here = torch.stack((k, v))
        # The gradient of a block follows it round the ring, one step behind, and comes home after the last.
        collected, collecting = torch.zeros_like(here, dtype=exact), None
        for step in range(num_ranks):
            arriving = pass_on(here, group) if step < num_ranks - 1 else None
            piece = ring_piece(group, step, q.shape[TIME])
            parts = piece_backward(piece, gradient, q, here[0], here[1], out, lse)
            dq[:, :, piece.queries] += parts[0]
            if collecting:
                collected = collecting()
            collected[:, :, :, piece.keys] += torch.stack(parts[1:])
            collecting = pass_on(collected, group)  # while the next piece is worked on
            here = arriving() if arriving else here
        assert collecting is not None
        dk, dv = collecting().to(k.dtype)
        return dq.to(q.dtype), dk, dv, None


def ring_piece(group: ProcessGroup, step: int, num_tokens: int) -> Piece:
    """What this rank's queries see of the block that is here after `step` steps, which is that of rank - step."""
    half = num_tokens // 2
    everything, first, second = slice(0, num_tokens), slice(0, half), slice(half, num_tokens)
    if step == 0:
        return Piece(everything, everything, causal=True)
    if step <= group.rank():  # from a rank before this one: its early chunk is behind both of ours, its late one ahead
        return Piece(everything, first, causal=False)
    return Piece(second, everything, causal=False)  # from a rank after: only our late chunk is behind it


def pass_on(block: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Sends the block to the next rank; call the result to wait for that of the rank before."""
    rank, num_ranks = group.rank(), group.size()
    return exchange(block, group, to=(rank + 1) % num_ranks, source=(rank - 1) % num_ranks)


class AllGather(Function):
    """Every rank gathers all k and v, for the forward and once more for the backward, and keeps only its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup) -> Tensor:
        merged = Merged(q)
        keys, values = gather_in_order(torch.stack((k, v)), group)
        for piece in gathered_pieces(group, q.shape[TIME]):
            merged.add(piece, q, keys, values)
        out = merged.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, merged.lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        exact = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=exact)
        whole = gather_in_order(torch.stack((k, v)), ctx.group)  # (2, B, K, T, D)
        collected = torch.zeros_like(whole, dtype=exact)
        for piece in gathered_pieces(ctx.group, q.shape[TIME]):
            parts = piece_backward(piece, gradient, q, whole[0], whole[1], out, lse)
            dq[:, :, piece.queries] += parts[0]
            collected[:, :, :, piece.keys] += torch.stack(parts[1:])
        dk, dv = reduce_scatter(by_rank(collected, ctx.group.size()), TIME + 1, ctx.group).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None


def gathered_pieces(group: ProcessGroup, num_tokens: int) -> list[Piece]:
    """This rank's two chunks, each looking at all that comes before it and at itself."""
    half, rank = num_tokens // 2, group.rank()
    pieces = []
    for queries, chunk in ((slice(0, half), rank), (slice(half, num_tokens), 2 * group.size() - 1 - rank)):
        if chunk:
            pieces.append(Piece(queries, slice(0, chunk * half), causal=False))
        pieces.append(Piece(queries, slice(chunk * half, (chunk + 1) * half), causal=True))
    return pieces


def gather_in_order(block: Tensor, group: ProcessGroup) -> Tensor:
    """All ranks' tokens, (2, B, K, t, D) to (2, B, K, T, D), in the order of the sequence."""
    chunks = all_gather(block, TIME + 1, group).chunk(2 * group.size(), TIME + 1)  # each rank's early and late one
    return torch.cat((*chunks[::2], *reversed(chunks[1::2])), TIME + 1)


def by_rank(whole: Tensor, num_ranks: int) -> Tensor:
    """The reverse: (2, B, K, T, D), with the two chunks of each rank beside each other."""
    chunks = whole.chunk(2 * num_ranks, TIME + 1)
    pairs = zip(chunks[:num_ranks], reversed(chunks[num_ranks:]))
    return torch.cat([chunk for pair in pairs for chunk in pair], TIME + 1)


def piece_backward(
    piece: Piece, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a piece adds to the gradients of its queries, keys and values."""
    gradient, q, out = (x[:, :, piece.queries] for x in (gradient, q, out))
    k, v = (x[:, :, piece.keys] for x in (k, v))
    return attend_backward(gradient, q, k, v, out, lse[:, :, piece.queries], piece.causal)


class Ulysses(nn.Module):
    """Trades tokens for heads, attends to whole sequences with the model's own core, and trades back.

    cp (times tp) can be at most the number of query heads. Where cp does not divide the kv heads, each is repeated as
    few times as will do.
    """

    def __init__(self, group: ProcessGroup, whole: nn.Module) -> None:
        super().__init__()
        self.group = group
        self.whole = whole

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As AttentionCore, for t tokens."""
        num_ranks = self.group.size()
        repeats = num_ranks // gcd(k.shape[1], num_ranks)
        k, v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
        q, k, v = (_Trade.apply(x, 1, TIME, self.group) for x in (q, k, v))
        return _Trade.apply(self.whole(q, k, v), TIME, 1, self.group)


class _Trade(Function):
    """Cuts x along one dimension, gives each rank a part, and joins what it gets along another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        return trade(x, cut, join, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return trade(gradient, ctx.join, ctx.cut, ctx.group), None, None, None


def trade(x: Tensor, cut: int, join: int, group: ProcessGroup) -> Tensor:
    """One all-to-all; no gradient."""
    parts = torch.stack(x.chunk(group.size(), cut))  # (n, ...)
    received = functional.wait_tensor(functional.all_to_all_single(parts, None, None, group))
    return torch.cat(received.unbind(0), join)


CORES: dict[str, Callable[[ProcessGroup, nn.Module], nn.Module]] = {  # each takes the model's own core as well
    "ring": lambda group, whole: InPieces(Ring, group),
    "allgather": lambda group, whole: InPieces(AllGather, group),
    "ulysses": Ulysses,
}
