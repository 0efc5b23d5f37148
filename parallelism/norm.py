"""The norm of a gradient whose parameters lie over ranks in different ways, and clipping by it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memory.copies import own_part


def square_grad_norm(
    parameters: Iterable[nn.Parameter],
    *,
    twins: Sequence[nn.Parameter] = (),
    others: Iterable[dist.ProcessGroup] = (),
) -> Tensor:
    """The squared norm of the whole gradient.

    Each logical parameter counts once: the shards of one are added over the axes it is sharded on, and of replicas each
    rank counts its own. `twins` are not counted: another rank counts them. `others` are groups of ranks that hold other
    parameters, as the stages of a pipeline do. Ranks meet once for each kind of sharding, not for each parameter.
    """
    alike: dict[tuple[tuple[int, ...], ...], list[Tensor]] = defaultdict(list)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and all(parameter is not twin for twin in twins):
            over = _sharded_over(gradient)
            alike[tuple(over)].append(own_part(gradient))
            groups |= over
    squares = torch.zeros((), device=next(iter(alike.values()))[0].device)
    for axes, tensors in alike.items():
        square = nn.utils.get_total_norm(tensors) ** 2
        for ranks in axes:
            dist.all_reduce(square, group=groups[ranks])
        squares = squares + square
    for group in others:
        dist.all_reduce(squares, group=group)
    return squares


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scales a gradient of this norm down to at most `max_norm`."""
    shards = [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _sharded_over(gradient: Tensor) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """The groups of ranks that hold different shards of this tensor, by their ranks.

    By group would not do: of equal meshes, made one after the other, DTensor takes now one and now the other, whose
    groups are two; ranks would then not add up alike.
    """
    if not isinstance(gradient, DTensor):
        return {}
    mesh = gradient.device_mesh
    groups = [
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and mesh.size(axis) > 1
    ]
    return {tuple(dist.get_process_group_ranks(group)): group for group in groups}
