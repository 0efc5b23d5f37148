"""Where memory goes in a step: every allocation of this rank on its device, by kind, as torch's profiler reports them.

The profiler (by private names of torch 2.11 and 2.13: its public ones record operators too, which costs more than the
step) sees each allocation and each release, on CPU and CUDA alike, whoever asked for it. On a CPU it also sees
what has been offloaded; of pinned memory beside a GPU it knows nothing. What an allocation is for follows from whose
memory it turns out to be (parameters, gradients, optimizer), else from when it lives: what a forward leaves behind is
an activation, what a backward leaves is a gradient on its way, what goes as it came is temporary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _EventType,
    _ExperimentalConfig,
)
from torch.profiler import record_function

from figures import new_figure, save_png
from memory.copies import HOST, own_part

# Ranges of a step, as record_function names them, that say what is going on when memory is asked for.
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
GATHERED = "FSDP::all_gather"  # FSDP's own: whole parameters
PHASES = (FORWARD, BACKWARD, OPTIMIZER)
NOTE = "note"
FOREVER = float("inf")
NUM_BINS = 600  # of the times of a step that a picture tells apart

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


@dataclass(frozen=True, slots=True)
class Event:
    """Memory that is asked for, or, with negative bytes, given back."""

    time: int  # in nanoseconds, as all times here
    address: int
    num_bytes: int
    ranges: tuple[tuple[str, int], ...]  # the names of those it happens in, from the outermost in, and their ends

    @property
    def phase(self) -> str | None:
        """The innermost phase it happens in."""
        return self._phase_and_end[0]

    @property
    def _phase_and_end(self) -> tuple[str | None, int]:
        return next(((name, end) for name, end in reversed(self.ranges) if name in PHASES), (None, 0))

    def kind(self, released: float) -> str:
        """What nobody owns is told by what it was asked for in, and by when it is given back."""
        names = [name for name, _ in self.ranges]
        if HOST in names:
            return "host"
        if GATHERED in names:
            return "parameters"
        phase, end = self._phase_and_end
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
        self._watching = False
        self._notes: list[dict[int, tuple[str, int]]] = []  # by address: kind and bytes of what owners held
        self._kept: list[Allocation] = []  # from one step to the next

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watches what happens inside, one step, if it is one of the first."""
        if self.num_left and not self._watching:
            self._watching = True
            _enable()
        self.note()
        yield
        self.note()

    def measured(self) -> dict[str, Any] | None:
        """The `peaks` of the step just over, if it was watched. To be asked once a step."""
        if not self._watching:
            return None
        result, notes = _disable_profiler(), self._notes
        self.num_left -= 1
        # The next begins at once: what is given back between two steps would be missed, and stay for ever.
        self._watching, self._notes = self.num_left > 0, []
        if self._watching:
            _enable()
        events, times = read_trace(result.experimental_event_tree(), self._device)
        if not events:
            return None
        self.steps.append(_moments(self._allocations(events, times, notes), events, since=times[0]))
        return peaks(self.steps[-1]) | ({"host": None} if self._device.type == "cuda" else {})

    def close(self) -> None:
        """No step will come any more."""
        if self._watching:
            _disable_profiler()
            self._watching = False

    def note(self) -> None:
        """Asks owners what is theirs, if the step is watched; a step has to do so while gradients are there."""
        if not self._watching:
            return
        with record_function(NOTE):
            held: dict[int, tuple[str, int]] = {}
            for kind, tensors in self._owners.items():
                for tensor in tensors():
                    part = own_part(tensor)
                    storage = part.untyped_storage()
                    if part.device.type == self._device.type and storage.nbytes():
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
        allocations = [*done, *live.values()]
        for time, note in zip(times, notes, strict=True):
            there = {each.address: each for each in allocations if each.begin <= time <= each.end}
            for address, (kind, num_bytes) in note.items():
                if address in there:
                    there[address].kind = kind
                else:  # older than all that was watched, so that nothing would tell when it is given back
                    allocations.append(Allocation(address, num_bytes, 0.0, FOREVER, kind))
        # What somebody owns, or was asked for outside of all phases, lasts. Of the rest a collective's thread may have
        # been the last to let go, which the profiler does not see.
        owned = {address for note in notes for address in note}
        lasting = owned | {address for address in live if address not in asked or asked[address].phase is None}
        self._kept = [each for each in live.values() if each.address in lasting]
        return allocations


def read_trace(tree: Sequence[Any], device: torch.device) -> tuple[list[Event], list[int]]:
    """The memory events of a device in a trace of torch's profiler, in order, and when each note had been taken."""
    entries: list[Any] = []
    rest = list(tree)
    while rest:
        entry = rest.pop()
        rest += entry.children
        entries.append(entry)
    entries.sort(key=lambda entry: entry.start_time_ns)
    events: list[Event] = []
    notes: list[int] = []
    ranges: tuple[tuple[str, int], ...] = ()
    for entry in entries:
        time = entry.start_time_ns
        if ranges and any(end < time for _, end in ranges):
            ranges = tuple((name, end) for name, end in ranges if end >= time)
        if entry.tag == _EventType.Allocation:
            _, fields = entry.typed
            if fields.device.type == device.type and fields.device.index in (None, device.index or 0):
                events.append(Event(time, fields.ptr, fields.alloc_size, ranges))
        else:
            name = GATHERED if entry.name.startswith(GATHERED) else entry.name
            ranges = (*ranges, (name, entry.end_time_ns))
            if name == NOTE:
                notes.append(entry.end_time_ns)
    return events, notes


def _enable() -> None:
    """Starts torch's profiler for memory and ranges alone: operators would be ten times as much to go through."""
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(config, {ProfilerActivity.CPU})
    _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})  # type: ignore[call-arg]


def _moments(allocations: Sequence[Allocation], events: Sequence[Event], since: int) -> list[Moment]:
    """What is held after events of the step, which began at `since`.

    Of each phase's part of each of NUM_BINS equal times, the fullest moment and the last: no peak is lost.
    """
    begun = {(each.address, each.begin): each for each in allocations}
    ended = {(each.address, each.end): each for each in allocations}
    held = dict.fromkeys(COLOURS, 0)
    for each in allocations:
        held[each.kind] += each.num_bytes if each.begin == 0 else 0
    width = max(events[-1].time - since, 1) / NUM_BINS
    fullest: dict[tuple[int, str | None], Moment] = {}
    last: dict[tuple[int, str | None], Moment] = {}
    for event in events:
        changed = (begun if event.num_bytes > 0 else ended).get((event.address, event.time))
        if changed is None:
            continue
        held[changed.kind] += changed.num_bytes if event.num_bytes > 0 else -changed.num_bytes
        if event.time > since:
            now = Moment((event.time - since) / 1e9, event.phase, dict(held))
            place = (int((event.time - since) / width), event.phase)
            last[place] = now
            if place not in fullest or now.total > fullest[place].total:
                fullest[place] = now
    kept = {id(moment): moment for moment in (*fullest.values(), *last.values())}
    return sorted(kept.values(), key=lambda moment: moment.seconds)


def peaks(moments: Sequence[Moment]) -> dict[str, Any]:
    """Bytes by kind when most is on the device: in the whole step, and, under `phases`, in each phase of it."""
    by_phase = {phase: [moment for moment in moments if moment.phase == phase] for phase in PHASES}
    peak = {phase: max(those, key=lambda moment: moment.total).held for phase, those in by_phase.items() if those}
    return {**max(moments, key=lambda moment: moment.total).held, "phases": peak}


def draw_footprint(steps: Sequence[Sequence[Moment]], path: Path, title: str) -> None:
    """Draws what the device held over the steps, stacked by kind, and as a line what host memory held."""
    figure = new_figure(14, 5)
    axes = figure.add_subplot()
    times: list[float] = []
    moments: list[Moment] = []
    for number, step in enumerate(steps, 1):
        begin = times[-1] if times else 0.0
        axes.axvline(begin, color="black", linewidth=0.5)
        axes.annotate(f" step {number}", (begin, 0.99), xycoords=("data", "axes fraction"), va="top", fontsize=8)
        times += [begin + moment.seconds for moment in step]
        moments += step
    mebibytes = {kind: [moment.held[kind] / 2**20 for moment in moments] for kind in COLOURS}
    kinds = [kind for kind, sizes in mebibytes.items() if kind != "host" and any(sizes)]
    colours = [COLOURS[kind] for kind in kinds]
    axes.stackplot(times, *(mebibytes[kind] for kind in kinds), labels=kinds, colors=colours, step="post")
    if any(mebibytes["host"]):
        axes.step(times, mebibytes["host"], where="post", color="black", linestyle=":", label="in host memory")
    axes.set(title=title, xlabel="seconds in steps", ylabel="MiB", xlim=(0, times[-1]))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])  # room for the numbers of steps
    figure.legend(loc="outside lower center", ncols=len(kinds) + 1, frameon=False)
    save_png(figure, path)
