"""A text sample from the model, to see what it has learned."""

from collections.abc import Callable

import torch
from torch import Tensor

TEMPERATURE = 0.8  # below 1: likelier tokens, so that a young model's text can be read


def sample(
    next_logits: Callable[[Tensor], Tensor],
    *,
    start: int,
    end: int,
    num_entries: int,
    length: int,
    context: int,
    seed: int,
    device: torch.device,
    agree: Callable[[int], int | None] = lambda token: token,
) -> list[int]:
    """Draws up to `length` tokens after the token `start`, stopping before `end`; the same on every rank.

    `next_logits` takes tokens (1, T) and gives (1, V); the model sees the last `context` tokens. Only the first
    `num_entries` of V are drawn: the model may have more rows than the tokenizer has entries. `agree` makes one token
    of those that the ranks have drawn, since their logits may differ in the last bit, or None to stop here.
    """
    generator = torch.Generator().manual_seed(seed)  # on the CPU, whose draws no device changes
    tokens = [start]
    for _ in range(length):
        window = torch.tensor([tokens[-context:]], device=device)  # (1, T)
        scores = next_logits(window)[0, :num_entries].float().cpu()
        chances = torch.softmax(scores / TEMPERATURE, dim=-1)  # (num_entries,)
        token = agree(int(torch.multinomial(chances, 1, generator=generator)))
        if token is None or token == end:
            break
        tokens.append(token)
    return tokens[1:]
