"""Where memory goes in a step: every allocation of this rank on its device, by kind, as torch's profiler reports them.

The profiler sees each allocation and each release, on CPU and CUDA alike, whoever asked for it. On a CPU it also sees
what has been offloaded; of pinned memory beside a GPU it knows nothing. What an allocation is for follows from whose
memory it turns out to be (parameters, gradients, optimizer), else from when it lives: what a forward leaves behind is
an activation, what a backward leaves is a gradient on its way, what goes as it came is temporary.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

# Ranges of a step, as record_function names them, that say what is going on when memory is asked for.
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
HOST = "host memory"
GATHERED = "FSDP::all_gather"  # FSDP's own: whole parameters
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
NOTE = "note"
FOREVER = float("inf")
MAX_ENTRIES = 200_000  # of cuda_history, which keeps the last; several KB each

COLOURS = {  # kinds, from the bottom of the picture up
    "parameters": "#4c78a8",
    "optimizer": "#72b7b2",
    "gradients": "#f58518",
    "activations": "#54a24b",
    "temporaries": "#e45756",
    "host": "#bab0ac",
}

Owners: TypeAlias = Mapping[str, Callable[[], Iterable[Tensor]]]  # of a kind, the tensors that are of it at the moment
Bytes: TypeAlias = dict[str, int]  # by kind


@dataclass(frozen=True)
class Moment:
    """What is held after an allocation or a release."""

    seconds: float  # since the step began
    phase: str | None
    held: Bytes

    @property
    def total(self) -> int:
        """All that is on the device: what has moved to host memory is not, also where the device is a CPU."""
        return sum(size for kind, size in self.held.items() if kind != "host")


@dataclass(frozen=True)
class Event:
    """Memory that is asked for, or, with negative bytes, given back."""

    time: float  # in microseconds, as all times of a trace
    address: int
    num_bytes: int
    ranges: tuple[tuple[str, float], ...]  # the names of those it happens in, from the outermost in, and their ends

    @property
    def phase(self) -> str | None:
        """The innermost phase it happens in."""
        return next((name for name, _ in reversed(self.ranges) if name in PHASES), None)

    def kind(self, released: float) -> str:
        """What nobody owns is told by what it was asked for in, and by when it is given back."""
        names = [name for name, _ in self.ranges]
        if HOST in names:
            return "host"
        if GATHERED in names:
            return "parameters"
        phase, end = next(((name, end) for name, end in reversed(self.ranges) if name in PHASES), (None, 0.0))
        left = {FORWARD: "activations", BACKWARD: "gradients"}  # behind, by a forward and by a backward
        return left.get(str(phase), "temporaries") if released > end else "temporaries"


@dataclass
class Allocation:
    """Memory from when it is asked for (0: before the step) until it is given back (infinity: not in the step)."""

    address: int
    num_bytes: int
    begin: float
    end: float
    kind: str


class Footprint:
    """The memory of a rank in its first steps."""

    def __init__(self, device: torch.device, owners: Owners, num_steps: int) -> None:
        self.steps: list[list[Moment]] = []
        self.num_left = num_steps
        self._device = device
        self._owners = owners
        self._profiler: profile | None = None
        self._notes: list[dict[int, tuple[str, int]]] = []  # by address: kind and bytes of what owners held
        self._kept: list[Allocation] = []  # from one step to the next

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watches what happens inside, one step, if it is one of the first."""
        if self.num_left and self._profiler is None:
            self._profiler = _started()
        self.note()
        yield
        self.note()

    def measured(self) -> dict[str, Any] | None:
        """The `peaks` of the step just over, if it was watched. To be asked once a step."""
        profiler, notes = self._profiler, self._notes
        if profiler is None:
            return None
        profiler.stop()
        self.num_left -= 1
        # The next begins at once: what is given back between two steps would be missed, and stay for ever.
        self._profiler, self._notes = _started() if self.num_left else None, []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events, times = read_trace(json.loads(path.read_text())["traceEvents"], self._device)
        moments = _moments(self._allocations(events, times, notes), events, since=times[0])
        if not moments:
            return None
        self.steps.append(moments)
        return peaks(moments) | ({"host": None} if self._device.type == "cuda" else {})

    def close(self) -> None:
        """No step will come any more."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def note(self) -> None:
        """Asks owners what is theirs, if the step is watched; a step has to do so while gradients are there."""
        if self._profiler is None:
            return
        with record_function(NOTE):
            held: dict[int, tuple[str, int]] = {}
            for kind, tensors in self._owners.items():
                for tensor in tensors():
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storage = local.untyped_storage()
                    if local.device.type == self._device.type and storage.nbytes():
                        held[storage.data_ptr()] = (kind, storage.nbytes())
            self._notes.append(held)

    def _allocations(
        self, events: Sequence[Event], times: Sequence[float], notes: Sequence[dict[int, tuple[str, int]]]
    ) -> list[Allocation]:
        """All memory that is held at some time since the step before, and what it is; notes, and their times."""
        live = {kept.address: Allocation(kept.address, kept.num_bytes, 0.0, FOREVER, kept.kind) for kept in self._kept}
        asked: dict[int, Event] = {}
        done: list[Allocation] = []
        for event in events:
            if event.num_bytes > 0:
                live[event.address] = Allocation(event.address, event.num_bytes, event.time, FOREVER, "")
                asked[event.address] = event
            elif event.address in live:
                gone = live.pop(event.address)
                gone.end = event.time
                gone.kind = gone.kind or asked[event.address].kind(event.time)
                done.append(gone)
        for left in live.values():
            left.kind = left.kind or asked[left.address].kind(FOREVER)
        self._kept = list(live.values())
        allocations = [*done, *live.values()]
        for time, note in zip(times, notes, strict=True):
            there = {each.address: each for each in allocations if each.begin <= time <= each.end}
            for address, (kind, num_bytes) in note.items():
                if address in there:
                    there[address].kind = kind
                else:  # older than all that was watched, so that nothing would tell when it is given back
                    allocations.append(Allocation(address, num_bytes, 0.0, FOREVER, kind))
        return allocations


def read_trace(trace: Sequence[Any], device: torch.device) -> tuple[list[Event], list[float]]:
    """The memory events of a device in a trace of torch's profiler, in order, and when each note had been taken."""
    index = -1 if device.type == "cpu" else (device.index or 0)
    events: list[Event] = []
    notes: list[float] = []
    ranges: list[tuple[str, float]] = []
    for entry in sorted(trace, key=lambda entry: float(entry.get("ts", 0))):
        time, name = float(entry.get("ts", 0)), str(entry.get("name"))
        if entry.get("cat") == "user_annotation":
            end = time + float(entry["dur"])
            ranges.append((GATHERED if name.startswith(GATHERED) else name, end))
            if name == NOTE:
                notes.append(end)
        elif name == "[memory]" and entry["args"]["Device Id"] == index:
            ranges = [(name, end) for name, end in ranges if end >= time]
            events.append(Event(time, entry["args"]["Addr"], entry["args"]["Bytes"], tuple(ranges)))
    return events, notes


def _started() -> profile:
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    return profiler


def _moments(allocations: Sequence[Allocation], events: Sequence[Event], since: float) -> list[Moment]:
    """What is held after each event of the step, which began at `since`."""
    begun = {(each.address, each.begin): each for each in allocations}
    ended = {(each.address, each.end): each for each in allocations}
    held = dict.fromkeys(COLOURS, 0)
    for each in allocations:
        held[each.kind] += each.num_bytes if each.begin == 0.0 else 0
    moments = []
    for event in events:
        changed = (begun if event.num_bytes > 0 else ended).get((event.address, event.time))
        if changed is not None:
            held[changed.kind] += changed.num_bytes if event.num_bytes > 0 else -changed.num_bytes
            if event.time > since:
                moments.append(Moment((event.time - since) / 1e6, event.phase, dict(held)))
    return moments


@contextmanager
def cuda_history(path: Path) -> Iterator[None]:
    """Has CUDA's allocator record what happens inside, and writes the last of it, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)


def peaks(moments: Sequence[Moment]) -> dict[str, Any]:
    """Bytes by kind when most is on the device: in the whole step, and, under `phases`, in each phase of it."""
    by_phase = {phase: [moment for moment in moments if moment.phase == phase] for phase in PHASES}
    peak = {phase: max(those, key=lambda moment: moment.total).held for phase, those in by_phase.items() if those}
    return {**max(moments, key=lambda moment: moment.total).held, "phases": peak}


def draw_footprint(steps: Sequence[Sequence[Moment]], path: Path, title: str) -> None:
    """Draws what the device held over the steps, stacked by kind, and as a line what host memory held."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # not pyplot: no display, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    axes = figure.add_subplot()
    times: list[float] = []
    moments: list[Moment] = []
    for number, step in enumerate(steps, 1):
        begin = times[-1] if times else 0.0
        axes.axvline(begin, color="black", linewidth=0.5)
        axes.annotate(f" step {number}", (begin, 0.99), xycoords=("data", "axes fraction"), va="top", fontsize=8)
        shown = thinned(step)
        times += [begin + moment.seconds for moment in shown]
        moments += shown
    mebibytes = {kind: [moment.held[kind] / 2**20 for moment in moments] for kind in COLOURS}
    kinds = [kind for kind, sizes in mebibytes.items() if kind != "host" and any(sizes)]
    colours = [COLOURS[kind] for kind in kinds]
    axes.stackplot(times, *(mebibytes[kind] for kind in kinds), labels=kinds, colors=colours, step="post")
    if any(mebibytes["host"]):
        axes.step(times, mebibytes["host"], where="post", color="black", linestyle=":", label="in host memory")
    axes.set(title=title, xlabel="seconds in steps", ylabel="MiB", xlim=(0, times[-1]))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])  # room for the numbers of steps
    figure.legend(loc="outside lower center", ncols=len(kinds) + 1, frameon=False)
    FigureCanvasAgg(figure).print_png(path)


def thinned(moments: Sequence[Moment], num_bins: int = 600) -> list[Moment]:
    """The fullest moment of each of so many equal parts of the step: no peak is lost."""
    length = moments[-1].seconds or 1.0
    fullest: dict[int, Moment] = {}
    for moment in moments:
        number = int(moment.seconds / length * num_bins)
        if number not in fullest or moment.total > fullest[number].total:
            fullest[number] = moment
    return list(fullest.values())
