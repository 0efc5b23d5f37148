"""A step in two halves, each with a gradient of its own: what the gradient noise scale is measured from.

Both halves go through all that a layout does to gradients, so their norms are those of whole logical gradients whatever
the layout, of samples that no two ranks count twice. Where ranks' gradients are reduced once a step, they are so twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from memory.copies import own_part
from memory.micro_batch import micro_batch_of_half

MicroBatch: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, both (B, T) int64; targets of -100 count nowhere


@dataclass(frozen=True)
class Halves:
    """Of each half: the squared norm of what it adds to the step's gradient, and its valid tokens, over all ranks."""

    squares: Tensor  # (2,)
    tokens: Tensor  # (2,)


def halve(micro_batches: Sequence[MicroBatch], multiple: int = 1) -> list[list[MicroBatch]] | None:
    """Every second sequence, and the others, in micro-batches; None: there are too few for a `multiple` of them.

    Ranks of data parallel take contiguous shares: of even ones, the halves are the same on all layouts.
    """
    inputs, targets = (torch.cat(tensors) for tensors in zip(*micro_batches))
    halves = []
    for first in (0, 1):
        x, y = inputs[first::2], targets[first::2]
        size = micro_batch_of_half(len(x), len(micro_batches[0][0]), multiple)
        if size is None:
            return None
        halves.append(list(zip(x.split(size), y.split(size))))
    return halves


def set_aside(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Takes the gradients off their parameters, so that the next backward begins anew."""
    aside = {}
    for parameter in parameters:
        if parameter.grad is not None:
            aside[parameter] = own_part(parameter.grad).clone()  # DDP's buckets, where they may lie, are used again
            parameter.grad = None
    return aside


def put_back(aside: dict[nn.Parameter, Tensor]) -> None:
    """Adds the gradients that were set aside to those that have come since."""
    torch._foreach_add_([own_part(parameter.grad) for parameter in aside], list(aside.values()))  # type: ignore[arg-type]
