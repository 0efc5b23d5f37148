"""A text sample from the model, to see what it has learned."""

from collections.abc import Callable

import torch
from torch import Tensor

TEMPERATURE = 0.8  # below 1: likelier tokens, so that a young model's text can be read


def sample(
    logits: Callable[[Tensor], Tensor],
    *,
    start: int,
    end: int,
    length: int,
    context: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Draws up to `length` tokens after the token `start`, stopping before `end`; the same on every rank.

    `logits` takes tokens (1, T) and gives (1, T, V); the model sees the last `context` tokens.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU, whose draws no device changes
    tokens = [start]
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)  # (1, T)
        chances = torch.softmax(logits(window)[0, -1].float().cpu() / TEMPERATURE, dim=-1)  # (V,)
        token = int(torch.multinomial(chances, 1, generator=generator))
        if token == end:
            break
        tokens.append(token)
    return tokens[1:]
