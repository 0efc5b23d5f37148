"""What each rank of a pipeline does when: from a schedule on paper, or measured; and its picture. Imports no torch."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import new_figure, save_png
from parallelism.schedules import SCHEDULES
from parallelism.slots import Orders, Slot, simulate

UNIT = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward costs two forwards
COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#e45756", "W": "#72b7b2"}
WORDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


@dataclass(frozen=True)
class Span:
    """A slot of a rank, with its start and end in seconds, or in forwards of a stage on paper."""

    rank: int
    slot: Slot
    start: float
    end: float


def on_paper(orders: Orders, costs: dict[str, float] = UNIT) -> list[Span]:
    """The spans of a schedule if stages are equal and communication takes no time; costs of each kind of slot."""
    ends = simulate(orders, costs)
    return [
        Span(rank, slot, ends[slot] - costs[slot.kind], ends[slot])
        for rank, order in enumerate(orders)
        for slot in order
    ]


def bubble(spans: Sequence[Span]) -> float:
    """The share of the time, from the first start to the last end, in which ranks compute nothing."""
    num_ranks = max(span.rank for span in spans) + 1
    total = max(span.end for span in spans) - min(span.start for span in spans)
    return 1 - sum(span.end - span.start for span in spans) / (num_ranks * total)


def theoretical_bubble(schedule: str, p: int, m: int, v: int) -> float:
    """The bubble in closed form, for equal stages, a backward of two forwards and enough micro-batches.

    Enough are p, and 2 p for the V-shaped. Naive: one rank works at a time. GPipe and 1F1B: (p-1)/(m+p-1) (Huang et
    al. 2019, section 2.3). Several stages a rank: (p-1)/(vm+p-1) (Narayanan et al. 2021, section 2.2). With halved
    backwards each rank idles (p-1)(F+B-W)/v, of m(F+B+W) that it works, where B is the backward of inputs (ZB-H1: Qi et
    al. 2023, table 2; the others have a stage's part of it, since stages are v times smaller).
    """
    if schedule == "naive":
        return 1 - 1 / p
    parts = 3 if SCHEDULES[schedule].splits_backward else 1
    return (p - 1) / (parts * v * m + p - 1)


def draw(spans: Sequence[Span], path: Path, title: str, unit: str = "seconds") -> None:
    """Draws one row a rank, one colour a kind, the micro-batch's number in each slot; stages of a rank in shades."""
    from matplotlib.patches import Patch

    num_ranks = max(span.rank for span in spans) + 1
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    figure = new_figure(14, 1.2 + 0.4 * num_ranks)
    axes = figure.add_subplot(xlim=(0, end - begin), ylim=(num_ranks - 0.5, -0.5), yticks=range(num_ranks))
    axes.set(title=title, xlabel=unit, ylabel="pipeline rank")
    alike: dict[tuple[int, str, int], list[Span]] = defaultdict(list)
    for span in spans:
        alike[span.rank, span.slot.kind, span.slot.stage // num_ranks].append(span)
    for (rank, kind, chunk), those in alike.items():
        bars = [(span.start - begin, span.end - span.start) for span in those]
        edge = min(0.8, 2000 * min(width for _, width in bars) / (end - begin))  # or it would cover narrow slots
        colour, alpha = COLOURS[kind], 1 / (1 + 0.5 * chunk)
        axes.broken_barh(bars, (rank - 0.45, 0.9), facecolor=colour, alpha=alpha, edgecolor="white", linewidth=edge)
        for span, (left, width) in zip(those, bars):
            if width > (end - begin) / 150:
                number = str(span.slot.micro_batch)
                axes.text(left + width / 2, rank, number, ha="center", va="center", fontsize=7)
    kinds = {span.slot.kind for span in spans}
    handles = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in COLOURS if kind in kinds]
    several = "; paler: a later stage of the rank" if max(span.slot.stage for span in spans) >= num_ranks else ""
    explained = f"numbers: micro-batches{several}"
    figure.legend(handles=handles, title=explained, loc="outside lower center", ncols=len(handles), frameon=False)
    save_png(figure, path)
