"""Schedules: batch, sequence length and learning rate as pure functions of the tokens consumed.

No torch and no state, so a resumed run needs its count of tokens alone. A batch schedule is a row of stages, each from
a number of tokens on; a step never straddles two. All is exact for any number of tokens, and takes the same time.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, pi, sqrt


@dataclass(frozen=True)
class Stage:
    """Steps of one size."""

    from_tokens: int  # it starts with the first step that begins at or after so many tokens
    tokens: int  # of one step
    seq_len: int  # tokens of one sequence
    lr_factor: float = 1.0  # by which the learning rate is multiplied


@dataclass(frozen=True)
class BatchSchedule:
    """Stages, and after how many tokens and steps each starts."""

    stages: tuple[Stage, ...]
    starts: tuple[int, ...]
    first_steps: tuple[int, ...]


def make_schedule(stages: Sequence[Stage]) -> BatchSchedule:
    """Where each stage starts, given their thresholds, which rise from 0. Every stage has at least one step."""
    starts, first_steps = [0], [0]
    for stage, following in pairwise(stages):
        num_steps = max(1, -(-(following.from_tokens - starts[-1]) // stage.tokens))
        starts.append(starts[-1] + num_steps * stage.tokens)
        first_steps.append(first_steps[-1] + num_steps)
    return BatchSchedule(tuple(stages), tuple(starts), tuple(first_steps))


def stage_index(tokens: int, batch: BatchSchedule) -> int:
    """The number, from 0, of the stage of the step that begins after `tokens` tokens."""
    return bisect_right(batch.starts, tokens) - 1


def batch_at(tokens: int, batch: BatchSchedule) -> Stage:
    """The stage of the step that begins after `tokens` tokens."""
    return batch.stages[stage_index(tokens, batch)]


def reached(tokens: int, batch: BatchSchedule) -> tuple[Stage, ...]:
    """The stages that have a step before `tokens` tokens are consumed."""
    return tuple(stage for start, stage in zip(batch.starts, batch.stages) if start < tokens)


def steps_at(tokens: int, batch: BatchSchedule) -> int:
    """The least number of steps that consume at least `tokens` tokens."""
    index = stage_index(tokens, batch)
    return batch.first_steps[index] - (batch.starts[index] - tokens) // batch.stages[index].tokens


def tokens_at(steps: int, batch: BatchSchedule) -> int:
    """Tokens consumed by so many steps."""
    index = bisect_right(batch.first_steps, steps) - 1
    return batch.starts[index] + (steps - batch.first_steps[index]) * batch.stages[index].tokens


def lengths_at(tokens: int, batch: BatchSchedule) -> list[tuple[int, int]]:
    """The lengths of sequences up to the step that begins after `tokens`: (from how many tokens on, the length)."""
    lengths = [(0, batch.stages[0].seq_len)]
    for start, stage in zip(batch.starts, batch.stages[: stage_index(tokens, batch) + 1]):
        if stage.seq_len != lengths[-1][1]:
            lengths.append((start, stage.seq_len))
    return lengths


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

# What the learning rate is multiplied by, where the batch is `ratio` times the reference. The square root is the rule
# of Adam (Malladi et al. 2022, On the SDEs and Scaling Rules for Adaptive Gradient Algorithms), linear that of SGD
# (Goyal et al. 2017, section 2.1).
SCALINGS: dict[str, Callable[[float], float]] = {
    "sqrt": sqrt,
    "linear": lambda ratio: ratio,
    "none": lambda ratio: 1.0,
}
UNITS = ("tokens", "steps")


@dataclass(frozen=True)
class LearningRate:
    """What `lr_at` needs; the three lengths are in units: tokens or steps."""

    shape: str
    peak: float
    final: float
    warmup: int
    decay: int  # wsd alone
    end: int  # of the way from peak to final
    unit: str = "tokens"
    batch_scaling: str = "none"
    batch_ref: int = 1  # tokens of a step for which the peak is meant


def lr_at(tokens: int, lr: LearningRate, batch: BatchSchedule) -> float:
    """Learning rate of the step that begins after `tokens` tokens: peak * shape * scaling(B / B_ref) * lr_factor.

    The shape is that of the step's end, or the first step would have a rate of 0.
    """
    stage = batch_at(tokens, batch)
    end = steps_at(tokens, batch) + 1 if lr.unit == "steps" else tokens + stage.tokens
    return unscaled_lr(end, lr) * SCALINGS[lr.batch_scaling](stage.tokens / lr.batch_ref) * stage.lr_factor


def unscaled_lr(units: int, lr: LearningRate) -> float:
    """Learning rate after so many units for a batch of `batch_ref`.

    It rises linearly to `peak` at `warmup`, then goes from `peak` to `final` by `shape` and stays there.
    """
    if units < lr.warmup:
        return lr.peak * units / lr.warmup
    length = max(1, lr.end - lr.warmup)
    progress = min(1.0, (units - lr.warmup) / length)
    return lr.final + (lr.peak - lr.final) * SHAPES[lr.shape](progress, lr.decay / length)
