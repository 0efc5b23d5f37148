"""Times what a rank of a pipeline does in a step, slot by slot."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from memory.footprint import BACKWARD, FORWARD
from parallelism.slots import Slot
from parallelism.timeline import Span


@dataclass
class Clock:
    """On a GPU it takes the time of events in the stream, so that nothing has to wait for it."""

    device: torch.device
    running: bool = False
    marks: list[tuple[Slot, Any, Any]] = field(default_factory=list)  # begun, ended
    start: Any = None

    def restart(self, group: ProcessGroup) -> None:
        """All ranks of the group begin to count from here, whatever the clocks of their nodes say."""
        self.marks = []
        if self.running:
            dist.barrier(group)
            self.start = self.now()

    def now(self) -> Any:
        """A point in time."""
        if self.device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def time(self, slot: Slot) -> Iterator[None]:
        """Around the work of a slot, which a profiler sees by its name."""
        with record_function(FORWARD if slot.kind == "F" else BACKWARD):
            begun = self.now() if self.running else None
            yield
        if self.running:
            self.marks.append((slot, begun, self.now()))

    def extend(self) -> None:
        """The last slot goes on until now."""
        if self.running:
            slot, begun, _ = self.marks[-1]
            self.marks[-1] = (slot, begun, self.now())

    def spans(self, rank: int) -> list[Span]:
        """The slots, in seconds since the start."""
        if self.device.type == "cuda" and self.marks:
            torch.cuda.synchronize()
        return [Span(rank, slot, self._since(begun), self._since(ended)) for slot, begun, ended in self.marks]

    def _since(self, mark: Any) -> float:
        return self.start.elapsed_time(mark) / 1000 if self.device.type == "cuda" else mark - self.start
