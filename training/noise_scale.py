"""The gradient noise scale: how many tokens a step needs before more of them stop helping.

B_simple = tr(Sigma) / |G|^2, where G is the gradient and Sigma its covariance from one token to another (McCandlish
et al. 2018, An Empirical Model of Large-Batch Training, section 2.2). Both are estimated from gradients of two batch
sizes, that of a step and that of its halves (appendix A.1), and depend on neither: averages go on where it changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

DECAY = 0.95  # of a measurement's weight with each later one: the last 20, about
LEAST = 5  # measurements before there is an estimate
SIGNIFICANT = 2.0  # standard errors by which |G|^2 has to be above 0


def estimate(whole_square: float, part_squares: Sequence[float], part_tokens: Sequence[float]) -> tuple[float, float]:
    """Unbiased estimates of |G|^2 and tr(Sigma), the variance of the gradient of one token, from one step.

    The step's gradient is that of the mean loss of its N tokens, with squared norm whole_square. It is the sum of what
    parts of n_i tokens add to it, which have squared norms part_squares. With q = sum (n_i/N)^2,

        E whole_square = |G|^2 + tr(Sigma) / N          E sum part_squares = q |G|^2 + tr(Sigma) / N

    which is solved for both. For two equal parts that is appendix A.1 with B_small = N/2 and B_big = N, and the mean
    over both small batches. Tokens of a sequence are no independent samples: Sigma is the covariance of a sequence's
    mean gradient, times its length.
    """
    num_tokens, parts_square = sum(part_tokens), sum(part_squares)
    q = sum((tokens / num_tokens) ** 2 for tokens in part_tokens)
    square = (whole_square - parts_square) / (1 - q)
    return square, num_tokens * (parts_square - q * square)


@dataclass
class NoiseScale:
    """Running averages, one of |G|^2 and one of tr(Sigma): their quotient is no average of quotients."""

    count: int = 0
    weight: float = 0.0  # the sum of all measurements' weights; the last has 1
    weight_square: float = 0.0  # the sum of their squares
    square: float = 0.0  # weighted sums: of |G|^2,
    square_square: float = 0.0  # of its square,
    trace: float = 0.0  # and of tr(Sigma)

    def add(self, square: float, trace: float) -> None:
        """Takes the estimates of a step."""
        self.count += 1
        self.weight = DECAY * self.weight + 1
        self.weight_square = DECAY**2 * self.weight_square + 1
        self.square = DECAY * self.square + square
        self.square_square = DECAY * self.square_square + square**2
        self.trace = DECAY * self.trace + trace

    @property
    def tokens(self) -> float | None:
        """B_simple; None while |G|^2 can't be told from 0, or tr(Sigma) is not above it."""
        if self.count < LEAST or self.trace <= 0:
            return None
        mean = self.square / self.weight
        variance = self.square_square / self.weight - mean**2
        error = sqrt(max(variance, 0.0) * self.weight_square) / self.weight
        return self.trace / self.square if mean > SIGNIFICANT * error else None


@dataclass
class Growth:
    """When a batch is to be doubled: it has been below `fraction` of the noise scale `patience` times in a row.

    A doubled batch is further from the noise scale by itself, and has to wait for as many measurements anew: that and a
    limit keep it from running away with a noisy estimate.
    """

    fraction: float
    patience: int
    max_tokens: int
    below: int = 0  # measurements in a row

    def next_tokens(self, tokens: int, noise_scale: float | None) -> int | None:
        """The tokens per step from now on, after a measurement at `tokens` of them; None: as before."""
        small = noise_scale is not None and tokens < self.fraction * noise_scale and 2 * tokens <= self.max_tokens
        self.below = self.below + 1 if small else 0
        if self.below < self.patience:
            return None
        self.below = 0
        return 2 * tokens
