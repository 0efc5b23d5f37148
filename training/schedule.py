"""Schedules: pure functions of the tokens consumed. No torch and no state, so a resumed run needs only its count."""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi


@dataclass(frozen=True)
class LearningRate:
    """What `lr_at` needs; all lengths in tokens."""

    shape: str
    peak: float
    final: float
    warmup_tokens: int
    decay_tokens: int  # wsd alone
    total_tokens: int


def cosine(progress: float, decay: float) -> float:
    """Half a cosine from 1 to 0 (SGDR, Loshchilov and Hutter 2017, eq. 5, without restarts)."""
    return 0.5 * (1 + cos(pi * progress))


def linear(progress: float, decay: float) -> float:
    """A straight line from 1 to 0."""
    return 1 - progress


def constant(progress: float, decay: float) -> float:
    """1 to the end."""
    return 1.0


def wsd(progress: float, decay: float) -> float:
    """Stable at 1, then a straight fall to 0 over the last part `decay` of the way (MiniCPM, Hu et al. 2024, 4.2)."""
    return min(1.0, (1 - progress) / decay) if decay > 0 else 1.0


SHAPES: dict[str, Callable[[float, float], float]] = {
    "cosine": cosine,
    "wsd": wsd,
    "linear": linear,
    "constant": constant,
}


def lr_at(tokens: int, schedule: LearningRate) -> float:
    """Learning rate of the step that ends at `tokens` consumed (its own included, so no step has a rate of 0).

    It rises linearly to `peak` at `warmup_tokens`, then goes from `peak` to `final` by `shape` and stays there.
    """
    if tokens < schedule.warmup_tokens:
        return schedule.peak * tokens / schedule.warmup_tokens
    length = max(1, schedule.total_tokens - schedule.warmup_tokens)
    progress = min(1.0, (tokens - schedule.warmup_tokens) / length)
    height = SHAPES[schedule.shape](progress, schedule.decay_tokens / length)
    return schedule.final + (schedule.peak - schedule.final) * height
