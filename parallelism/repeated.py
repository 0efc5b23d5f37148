"""Parameters that several ranks hold, each with a gradient of what it alone computes: these are added up here."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memory.copies import own_part
from parallelism.collectives import all_reduce, exchange


def own_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's gradient, which has to be there."""
    assert parameter.grad is not None
    return own_part(parameter.grad)


def add_replicated_gradients(weights: dict[nn.Parameter, float], group: ProcessGroup) -> None:
    """Adds up, in one go, the gradients of parameters that each rank of tp has, times a weight: see `apply_tp`."""
    shards = [own_gradient(parameter) for parameter in weights]
    parts = [shard.flatten() * weight for shard, weight in zip(shards, weights.values())]
    whole = all_reduce(torch.cat(parts), group)
    for shard, total in zip(shards, whole.split([shard.numel() for shard in shards])):
        shard.copy_(total.view_as(shard))


def add_tied_gradients(ends: list[nn.Parameter], group: ProcessGroup) -> None:
    """The ranks of a pipeline's first and last stage exchange their gradients of a tied weight, and add them.

    `ends`: of the embedding and the head those that are on this rank.
    """
    gradients = [own_gradient(parameter) for parameter in ends]
    if len(gradients) == 2:  # both stages are here
        first, last = gradients
        last.copy_(first.add_(last))
    elif gradients:
        peer = group.size() - 1 if group.rank() == 0 else 0
        gradients[0] += exchange(gradients[0], group, to=peer, source=peer)()
