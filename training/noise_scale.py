"""The gradient noise scale: how many tokens a step needs before more of them stop helping.

B_simple = tr(Sigma) / |G|^2, where G is the gradient and Sigma its covariance from one token to another (McCandlish
et al. 2018, An Empirical Model of Large-Batch Training, section 2.2). Both are estimated from gradients of two batch
sizes, that of a step and that of its halves (appendix A.1), and depend on neither: averages go on where the batch
changes. They do so where the length of sequences changes, too, although G and Sigma are then others: the old are soon
forgotten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

DECAY = 0.95  # of a measurement's weight with each later one: the last 20, about
LEAST = 5  # measurements before there is an estimate
SIGNIFICANT = 3.0  # standard errors by which |G|^2 has to be above 0


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

    num_measurements: int = 0
    weight: float = 0.0  # the sum of all measurements' weights; the last has 1
    weight_square: float = 0.0  # the sum of their squares
    square: float = 0.0  # weighted sums: of |G|^2,
    square_square: float = 0.0  # of its square,
    trace: float = 0.0  # and of tr(Sigma)

    def add(self, square: float, trace: float) -> None:
        """Takes the estimates of a step."""
        self.num_measurements += 1
        self.weight = DECAY * self.weight + 1
        self.weight_square = DECAY**2 * self.weight_square + 1
        self.square = DECAY * self.square + square
        self.square_square = DECAY * self.square_square + square**2
        self.trace = DECAY * self.trace + trace

    @property
    def scale(self) -> float | None:
        """B_simple in tokens; None while |G|^2 can't be told from 0, or tr(Sigma) is not above it."""
        if self.num_measurements < LEAST or self.trace <= 0:
            return None
        mean, spread = self.square / self.weight, self.weight_square / self.weight**2
        # The variance of one measurement, unbiased for weights, and from it that of the mean.
        variance = max(self.square_square / self.weight - mean**2, 0.0) / (1 - spread)
        return self.trace / self.square if mean > SIGNIFICANT * sqrt(variance * spread) else None


@dataclass
class Growth:
    """When a batch is to be doubled: it was below `double_below` times the noise scale, `double_after` times in a row.

    After that the count begins anew, since averages follow slowly; and the batch never passes `double_to` tokens.
    """

    double_below: float
    double_after: int
    double_to: int
    num_below: int = 0  # measurements in a row

    def wants(self, tokens: int, noise_scale: float | None) -> bool:
        """Whether a batch of so many tokens is to be doubled, after a measurement at it."""
        small = noise_scale is not None and tokens < self.double_below * noise_scale and 2 * tokens <= self.double_to
        self.num_below = self.num_below + 1 if small else 0
        return self.num_below >= self.double_after
