"""Collectives that autograd can follow: each knows what its gradient has to do. Torch's functional ones do the work.

Told for the ranks of one group, with x the tensor of this rank. `dim` is the dimension that is cut or joined.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

SMALL = 2**16  # bytes up to which a sum on CPUs waits for rounds of messages and not for their size

# Torch 2.13 has renamed them, and warns of the old names.
_all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over all ranks, on every rank, bitwise the same on each. No gradient."""
    if not x.is_cuda and x.nbytes <= SMALL:
        # Everybody sends all to everybody: more bytes, but one round of messages where gloo's ring takes 2(n-1).
        copies = x.expand(group.size(), *x.shape).contiguous()
        return functional.wait_tensor(functional.all_to_all_single(copies, None, None, group)).sum(0)
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """All ranks' tensors of one shape, joined along `dim`, on every rank. No gradient."""
    return functional.wait_tensor(_all_gather(x.contiguous(), dim % x.ndim, group))


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part, along `dim`, of the sum over all ranks. No gradient."""
    # Gloo's own reduces everything and throws most of it away.
    return _native_reduce_scatter(x, dim, group) if x.is_cuda else _exchange_and_add(x, dim, group)


def _native_reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return functional.wait_tensor(_reduce_scatter(x.contiguous(), "sum", dim % x.ndim, group))


def _exchange_and_add(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Moves as few bytes as a true reduce-scatter, and takes half the time of gloo's."""
    parts = torch.stack(x.chunk(group.size(), dim))  # (ranks, ...)
    return functional.wait_tensor(functional.all_to_all_single(parts, None, None, group)).sum(0)


def exchange(x: Tensor, group: ProcessGroup, *, to: int, source: int) -> Callable[[], Tensor]:
    """Sends x to one rank of the group; call the result to wait for what another has sent, of the same shape."""
    x = x.contiguous()
    arriving = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, group=group, group_peer=to),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=source),
        ]
    )

    def arrive() -> Tensor:
        while works:  # each holds the tensor that it moved, and is not to outlive it
            works.pop().wait()
        return arriving

    return arrive


class Copy(Function):
    """x itself, into work that is shared out over the ranks: its gradient is the sum of what each rank's part gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class Sum(Function):
    """The sum of all ranks' parts, on every rank; the gradient of the sum is that of each part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gather(Function):
    """Copy, where each rank holds a part of x along `dim`: joins the parts first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter(gradient, ctx.dim, ctx.group), None, None


class Scatter(Function):
    """Sum, of which each rank keeps its part along `dim`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.dim, ctx.group), None, None
