"""The batch of a run as it goes: its schedule, the noise scale beside it, and how that may drive the schedule."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from parallelism.distributed_model import DistributedModel
from parallelism.halves import Halves
from training.job import Job
from training.noise_scale import Growth, NoiseScale, estimate
from training.schedule import Stage, make_schedule

STATE = "batch.json"


class BatchControl:
    """Every rank has one, and all come to the same batches; rank 0's has the run's folder and keeps its state there."""

    def __init__(self, job: Job, folder: Path | None = None) -> None:
        keys = job.config.batch
        self.schedule = job.budget.batch  # with the stages that were decided on
        self.noise = NoiseScale()
        self.measured: list[tuple[int, float]] = []  # after how many tokens, and the noise scale there
        self._growth = Growth(keys.double_below, keys.double_after, keys.double_to) if keys.double_to else None
        self._every = job.config.noise.every
        self._folder = folder

    def due(self, step: int) -> bool:
        """Whether a step is to be taken in halves."""
        return self._every > 0 and step % self._every == 0

    def measure(self, model: DistributedModel, halves: Halves, grad_norm: float, tokens: int) -> dict[str, Any] | None:
        """Takes the measurement of a step that ended at `tokens` tokens; the norm is that before clipping.

        Returns what led to it where the batch is to double from here on.
        """
        squares, counts = halves.squares.tolist(), halves.tokens.tolist()
        if min(counts) > 0:  # or a half has no target
            self.noise.add(*estimate(grad_norm**2, squares, counts))
        if self.noise.scale is not None:
            self.measured.append((tokens, self.noise.scale))
        decision = self._decide(model, tokens) if self._growth else None
        if self._folder is not None:
            new = self._folder / f"{STATE}.new"
            new.write_text(json.dumps(self.state()))
            new.replace(self._folder / STATE)  # whole even after kill -9
        return decision

    def _decide(self, model: DistributedModel, tokens: int) -> dict[str, Any] | None:
        assert self._growth is not None
        stage = self.schedule.stages[-1]
        # Ranks' norms may differ in the last bit: the batch doubles when none is against it.
        (against,) = model.largest(int(not self._growth.wants(stage.tokens, self.noise.scale)))
        if against:
            return None
        self._growth.num_below = 0
        following = replace(stage, from_tokens=tokens, tokens=2 * stage.tokens)
        self.schedule = make_schedule([*self.schedule.stages, following])
        return {
            "noise_scale": self.noise.scale,
            "grad_square": self.noise.square / self.noise.weight,
            "grad_trace": self.noise.trace / self.noise.weight,
            "batch_tokens": stage.tokens,
            "next_batch_tokens": following.tokens,
        }

    def state(self) -> dict[str, Any]:
        """All that a run which goes on from here has to know."""
        stages = [asdict(stage) for stage in self.schedule.stages]
        rows = ",".join("{" + ",".join(f"{key}:{value}" for key, value in stage.items()) + "}" for stage in stages)
        return {
            "stages": stages,
            "noise": asdict(self.noise),
            "num_below": self._growth.num_below if self._growth else 0,
            "replay": f"batch=ramp 'batch.stages=[{rows}]'",  # overrides for another run, which then has these stages
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from the state that another run left."""
        self.schedule = make_schedule([Stage(**stage) for stage in state["stages"]])
        self.noise = NoiseScale(**state["noise"])
        if self._growth:
            self._growth.num_below = state["num_below"]
