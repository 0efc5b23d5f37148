"""The vocabulary shared out over ranks: each has the logits of some entries, and no rank ever holds all of them.

The first ranks take ceil(V/n) entries each, as torch.chunk and DTensor do; the last may have fewer, or none.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from models.gpt import IGNORED
from parallelism.collectives import all_gather


def vocabulary_part(vocab_size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """The entries of a rank: the first of them, and the one behind the last."""
    size = -(-vocab_size // num_ranks)
    return min(rank * size, vocab_size), min((rank + 1) * size, vocab_size)


class VocabularyLoss:
    """Takes the place of `models.gpt.token_loss` where each rank of a group has the logits of its entries alone."""

    def __init__(self, group: ProcessGroup, vocab_size: int) -> None:
        self.group = group
        self.vocab_size = vocab_size

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats summed over the targets other than -100, on every rank.

        logits: (B, T, this rank's entries); targets: (B, T) int64, numbered in the whole vocabulary.
        """
        first, _ = vocabulary_part(self.vocab_size, self.group.rank(), self.group.size())
        return _VocabularyCrossEntropy.apply(logits, targets, first, self.group)

    def gather(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary, (B, V), on every rank: for sampling."""
        missing = -(-self.vocab_size // self.group.size()) - logits.shape[-1]
        return all_gather(F.pad(logits, (0, missing)), -1, self.group)[..., : self.vocab_size]


class _VocabularyCrossEntropy(Function):
    """log sum exp(logits) - logits[target], of which each rank knows a part; the ranks meet once, with two numbers a
    token. The gradient, softmax - onehot, needs no one else (Shoeybi et al. 2019, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: ProcessGroup) -> Tensor:
        # What is kept for the backward is the logits as they came.
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))  # (B, T, V/n)
        num_entries = logits.shape[-1]
        index = targets - first
        mine = (index >= 0) & (index < num_entries)  # (B, T)
        index = index.clamp(0, max(0, num_entries - 1)).unsqueeze(-1)
        # A rank without entries adds exp(-inf) = 0 to the sum.
        parts = F.pad(exact, (0, 1), value=-torch.inf) if num_entries == 0 else exact
        part = torch.stack((parts.logsumexp(-1), parts.gather(-1, index).squeeze(-1).where(mine, 0.0)))
        log_sums, own = all_gather(part, 0, group).unflatten(0, (-1, 2)).unbind(1)  # each (n, B, T)
        log_sum = log_sums.logsumexp(0)  # (B, T)
        valid = targets != IGNORED
        ctx.save_for_backward(logits, log_sum, index, mine, valid)
        return (log_sum - own.sum(0)).where(valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum, index, mine, valid = ctx.saved_tensors
        chances = (logits - log_sum.unsqueeze(-1)).exp_()  # (B, T, V/n)
        if chances.shape[-1]:
            chances.scatter_add_(-1, index, -mine.unsqueeze(-1).to(chances.dtype))
        return chances.mul_(valid.unsqueeze(-1) * gradient).type_as(logits), None, None, None
