"""From the keys of `batch` to stages with numbers, and the run's end. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor, sqrt
from typing import Any

from training.config import Config
from training.schedule import BatchSchedule, LearningRate, Stage, make_schedule, reached, steps_at, tokens_at


def scale_down(config: Config, unit: Callable[[int], int]) -> tuple[Config, list[str]]:
    """The configuration that batch.scale makes of one, itself with a scale of 1; and what was rounded, in words.

    Thresholds, train.tokens and lengths of the learning rate are multiplied by it, tokens per step by its square root,
    to the nearest multiple of `unit(seq_len)`, which the layout can run. train.steps and lr.batch_ref stay as they are.
    """
    batch, lr, scale = config.batch, config.lr, config.batch.scale
    if scale == 1:
        return config, []
    notices = []

    def length(tokens: int | str) -> int | str:
        # Rounded down, what fitted into the run still does; as a fraction, since 1e-7 is no binary number.
        return tokens if isinstance(tokens, str) else floor(tokens * Fraction(str(scale)))

    def per_step(tokens: int, seq_len: int) -> int:
        wanted, step = tokens * sqrt(scale), unit(seq_len)
        found = max(1, round(wanted / step)) * step
        notices.append(
            f"batch.scale={scale:g}: {tokens:,} tokens a step become {found:,} ({wanted:,.1f} before rounding)"
        )
        return found

    if batch.stages:
        stages = [
            replace(stage, from_tokens=round(stage.from_tokens * scale), tokens=per_step(stage.tokens, stage.seq_len))
            for stage in batch.stages
        ]
        for before, stage in pairwise(stages):  # where scaling has made thresholds the same
            stage.from_tokens = max(stage.from_tokens, before.from_tokens + 1)
        batch = replace(batch, stages=stages)
    else:
        assert batch.tokens is not None
        assert batch.seq_len is not None
        tokens = per_step(batch.tokens, batch.seq_len)
        most = None if batch.double_to is None else tokens * batch.double_to // batch.tokens  # as many doublings
        batch = replace(batch, tokens=tokens, double_to=most)
    budget = None if config.train.tokens is None else max(1, round(config.train.tokens * scale))
    if budget is None:
        notices.append(f"batch.scale={scale:g} leaves train.steps={config.train.steps} as it is")
    else:
        notices.append(f"batch.scale={scale:g}: train.tokens={config.train.tokens:,} become {budget:,}")
    lengths: dict[str, Any] = {key: length(getattr(lr, key)) for key in ("warmup_tokens", "decay_tokens")}
    lengths["end_tokens"] = lr.end_tokens if isinstance(lr.end_tokens, str) else max(1, ceil(lr.end_tokens * scale))
    return (
        replace(
            config,
            batch=replace(batch, scale=1.0),
            lr=replace(lr, **lengths),
            train=replace(config.train, tokens=budget),
        ),
        notices,
    )


@dataclass(frozen=True)
class Budget:
    """The steps of a run: their stages, and its end."""

    batch: BatchSchedule
    total_tokens: int  # consumed by the last step; if the noise scale drives the batch, when to stop
    num_steps: int | None  # None: it does

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Those that the run reaches."""
        return reached(self.total_tokens, self.batch)


def make_budget(config: Config) -> Budget:
    """The stages of a configuration whose scale is 1. ValueError: the noise scale drives them, and can't."""
    keys, train = config.batch, config.train
    stages = [Stage(each.from_tokens, each.tokens, each.seq_len, each.lr_factor) for each in keys.stages]
    if not stages:
        assert keys.tokens is not None
        assert keys.seq_len is not None
        stages = [Stage(0, keys.tokens, keys.seq_len)]
    batch = make_schedule(stages)
    if keys.double_to is not None:
        if train.tokens is None or config.lr.unit == "steps" or config.noise.every == 0:
            raise ValueError(
                f"batch.double_to={keys.double_to} has the noise scale drive the batch, so that steps are not known "
                f"before: train.steps={train.steps}, lr.unit={config.lr.unit}, noise.every={config.noise.every}; "
                "valid: train.tokens=N train.steps=null lr.unit=tokens noise.every=10"
            )
        return Budget(batch, train.tokens, None)
    steps = train.steps or steps_at(train.tokens or 1, batch)
    return Budget(batch, tokens_at(steps, batch), steps)


def doublings(tokens: int, double_to: int) -> list[int]:
    """The sizes that a batch can come to by doubling: [2 tokens, 4 tokens, ...], none above double_to."""
    sizes = []
    while 2 * tokens <= double_to:
        tokens *= 2
        sizes.append(tokens)
    return sizes


def resolve_lr(config: Config, budget: Budget) -> tuple[LearningRate, dict[str, Any]]:
    """The learning rate, and its keys with each `auto` filled in. ValueError: its parts overrun its end."""
    lr, total = config.lr, config.train.tokens or budget.total_tokens
    warmup = total // 20 if isinstance(lr.warmup_tokens, str) else lr.warmup_tokens
    decay = total // 5 if isinstance(lr.decay_tokens, str) else lr.decay_tokens
    end = total if isinstance(lr.end_tokens, str) else lr.end_tokens
    ref = budget.batch.stages[0].tokens if isinstance(lr.batch_ref, str) else lr.batch_ref
    if warmup + (decay if lr.shape == "wsd" else 0) > end:
        decays = f" and lr.decay_tokens={decay}" if lr.shape == "wsd" else ""
        of = f"{end} tokens of the run" if isinstance(lr.end_tokens, str) else f"lr.end_tokens={end}"
        valid = "lr.warmup_tokens=auto" + (" lr.decay_tokens=auto" if decays else "")
        raise ValueError(f"lr.warmup_tokens={warmup}{decays} are more than the {of}; valid: fewer, or {valid}")
    shape = LearningRate(lr.shape, lr.peak, lr.final, warmup, decay, end, lr.unit, lr.batch_scaling, ref)
    if lr.unit == "steps":
        last, before = (steps_at(tokens, budget.batch) for tokens in (end, max(end - decay, 0)))
        shape = replace(shape, warmup=steps_at(warmup, budget.batch), decay=last - before, end=last)
    keys: dict[str, Any] = {"warmup_tokens": warmup, "decay_tokens": decay, "end_tokens": end, "batch_ref": ref}
    return shape, keys
