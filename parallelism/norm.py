"""The norm of a gradient whose parameters lie over ranks in different ways, and clipping by it."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales the gradient down to at most `max_norm`; returns the norm of the whole of it before that.

    Each logical parameter counts once: the shards of one are added over the axes it is sharded on, and of replicas each
    rank counts its own. Ranks meet once for each kind of sharding, not once for each parameter.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    alike: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for gradient, shard in zip(gradients, shards):
        alike[_sharded_over(gradient)].append(shard)
    squares = torch.zeros((), device=shards[0].device)
    for groups, tensors in alike.items():
        square = nn.utils.get_total_norm(tensors) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        squares += square
    norm = squares.sqrt()
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _sharded_over(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that hold different shards of this tensor."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    )
