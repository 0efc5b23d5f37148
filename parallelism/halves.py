"""A step in two halves, each with a gradient of its own: what the gradient noise scale is measured from.

Both go through all that a layout does to gradients. So their norms are those of whole gradients, each logical parameter
once and each sequence in one half, whatever the layout. Where gradients are reduced once a step, they now are twice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from memory.copies import own_part
from memory.micro_batch import micro_batches_of_halves
from parallelism.repeated import own_gradient

MicroBatch: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, both (B, T) int64; targets of -100 count nowhere
Gradients = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class Halves:
    """Of each half: the squared norm of what it adds to the step's gradient, and its valid tokens, over all ranks."""

    squares: Tensor  # (2,)
    tokens: Tensor  # (2,)


def halve(micro_batches: Sequence[MicroBatch], multiple: int | None = None) -> list[list[MicroBatch]] | None:
    """Every second sequence, and the others, in micro-batches; None: there are too few.

    Ranks of data parallel take contiguous shares: of even ones, the halves are the same on all layouts. In a pipeline,
    which runs a `multiple` of micro-batches, all have one size.
    """
    inputs, targets = (torch.cat(tensors) for tensors in zip(*micro_batches))
    sizes = micro_batches_of_halves(len(inputs), len(micro_batches[0][0]), multiple)
    if sizes is None:
        return None
    parts = ((inputs[first::2].split(size), targets[first::2].split(size)) for first, size in enumerate(sizes))
    return [list(zip(x, y)) for x, y in parts]


def take_gradients(parameters: Iterable[nn.Parameter]) -> Gradients:
    """Takes the gradients off their parameters, so that the next backward begins anew."""
    taken = Gradients()
    for parameter in parameters:
        if parameter.grad is not None:
            taken[parameter], parameter.grad = parameter.grad, None
    return taken


def give_gradients(gradients: Gradients) -> None:
    """Gives them to their parameters."""
    for parameter, gradient in gradients.items():
        parameter.grad = gradient


def add_gradients(gradients: Gradients) -> None:
    """Adds them to those that the parameters have."""
    own = [own_gradient(parameter) for parameter in gradients]
    torch._foreach_add_(own, [own_part(gradient) for gradient in gradients.values()])
