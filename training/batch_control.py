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
        keys, train = job.config.batch, job.config.train
        self.schedule = job.budget.batch  # with the stages that were decided on
        self.noise = NoiseScale()
        self.measured: list[tuple[int, float]] = []  # after how many tokens, and the noise scale there
        self._growth = Growth(keys.fraction, keys.patience, keys.max_tokens) if keys.max_tokens else None
        self._every = job.config.noise.every
        self._timed = train.timeline_step
        self._folder = folder

    def due(self, step: int) -> bool:
        """Whether a step is to be taken in halves; not the one whose pipeline is drawn, which is not as others are."""
        return self._every > 0 and step % self._every == 0 and step != self._timed

    def add(self, halves: Halves, grad_norm: float, tokens: int) -> None:
        """Takes the measurement of a step that ended at `tokens` tokens; the norm is that before clipping."""
        self.noise.add(*estimate(grad_norm**2, halves.squares.tolist(), halves.tokens.tolist()))
        if self.noise.tokens is not None:
            self.measured.append((tokens, self.noise.tokens))

    def decide(self, model: DistributedModel, tokens: int) -> dict[str, Any] | None:
        """After a measurement: a batch that is to double does so from here on, and what led to it is returned."""
        decision = None
        if self._growth is not None:
            stage = self.schedule.stages[-1]
            # Ranks' norms may differ in the last bit.
            (size,) = model.largest(self._growth.next_tokens(stage.tokens, self.noise.tokens) or 0)
            if size:
                self._growth.below = 0
                following = replace(stage, from_tokens=tokens, tokens=size)
                self.schedule = make_schedule([*self.schedule.stages, following])
                decision = {
                    "noise_scale": self.noise.tokens,
                    "grad_square": self.noise.square / self.noise.weight,
                    "grad_trace": self.noise.trace / self.noise.weight,
                    "batch_tokens": stage.tokens,
                    "next_batch_tokens": size,
                }
        self._save()
        return decision

    def state(self) -> dict[str, Any]:
        """All that a run which goes on from here has to know."""
        stages = [asdict(stage) for stage in self.schedule.stages]
        return {"stages": stages, "noise": asdict(self.noise), "below": self._growth.below if self._growth else 0}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from the state that another run left."""
        self.schedule = make_schedule([Stage(**stage) for stage in state["stages"]])
        self.noise = NoiseScale(**state["noise"])
        if self._growth:
            self._growth.below = state["below"]

    def _save(self) -> None:
        if self._folder is not None:
            new = self._folder / f"{STATE}.new"
            new.write_text(json.dumps(self.state()))
            new.replace(self._folder / STATE)  # whole even after kill -9
