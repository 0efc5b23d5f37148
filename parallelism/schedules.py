"""Pipeline schedules: in which order each rank computes which micro-batch of which stage. Imports no torch.

p ranks, m micro-batches, v stages a rank. Each schedule is a function of these three that gives every rank's order;
training runs it, and the planner draws it. Those with whole backwards are here, the others in `zero_bubble.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from parallelism.slots import Orders, Slot
from parallelism.zero_bubble import dualpipev, interleaved_zb, zb_h1, zbv


def naive(p: int, m: int, v: int) -> Orders:
    """One micro-batch at a time goes through all stages and back, while the other ranks wait."""
    return [
        [
            slot
            for micro_batch in range(m)
            for slot in (*_forwards(rank, p, v, micro_batch), *_backwards(rank, p, v, micro_batch))
        ]
        for rank in range(p)
    ]


def _forwards(rank: int, p: int, v: int, micro_batch: int) -> list[Slot]:
    return [Slot(rank + chunk * p, "F", micro_batch) for chunk in range(v)]


def _backwards(rank: int, p: int, v: int, micro_batch: int) -> list[Slot]:
    return [Slot(rank + chunk * p, "B", micro_batch) for chunk in reversed(range(v))]


def gpipe(p: int, m: int, v: int) -> Orders:
    """All forwards, then all backwards (Huang et al. 2019, section 2.2)."""
    return [
        [Slot(rank, "F", micro_batch) for micro_batch in range(m)]
        + [Slot(rank, "B", micro_batch) for micro_batch in range(m)]
        for rank in range(p)
    ]


def looped_bfs(p: int, m: int, v: int) -> Orders:
    """GPipe with several stages a rank: all micro-batches through one, then through the next (Lamy-Poirier 2023)."""
    return [
        [Slot(rank + chunk * p, "F", micro_batch) for chunk in range(v) for micro_batch in range(m)]
        + [Slot(rank + chunk * p, "B", micro_batch) for chunk in reversed(range(v)) for micro_batch in range(m)]
        for rank in range(p)
    ]


def interleaved_1f1b(p: int, m: int, v: int) -> Orders:
    """One forward, one backward in turn, as soon as there is a backward to do; p has to divide m where v is above 1.

    Narayanan et al. 2021, section 2.2. The k-th forward of a rank is of chunk k // p % v: p micro-batches go through
    a chunk, then through the next.
    """
    orders = []
    for rank in range(p):
        forwards = [Slot(k // p % v * p + rank, "F", k // (p * v) * p + k % p) for k in range(m * v)]
        backwards = [Slot((v - 1 - k // p % v) * p + rank, "B", k // (p * v) * p + k % p) for k in range(m * v)]
        ahead = min(m * v, p - rank - 1 if v == 1 else (p - rank - 1) * 2 + (v - 1) * p)
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards):
            order += [forward, backward]
        orders.append(order + backwards[m * v - ahead :])
    return orders


@dataclass(frozen=True)
class Schedule:
    """A schedule, and what it asks of a pipeline."""

    orders: Callable[[int, int, int], Orders]
    least_stages: int = 1  # of a rank
    most_stages: int | None = 1  # None: any number
    v_shaped: bool = False  # the stages go there and back over the ranks, not round them
    splits_backward: bool = False  # a backward comes in two halves
    rounds: bool = False  # several stages a rank need a number of micro-batches that p divides

    def allows(self, v: int) -> bool:
        """Whether a rank may have v stages."""
        return self.least_stages <= v and (self.most_stages is None or v <= self.most_stages)

    def multiple(self, p: int, v: int) -> int:
        """What has to divide the number of micro-batches."""
        return p if self.rounds and v > 1 else 1

    @property
    def usual_stages(self) -> int:
        """Stages of a rank if nobody says how many: two, where that may be."""
        return 2 if self.allows(2) else 1


SCHEDULES = {
    "naive": Schedule(naive),
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(interleaved_1f1b),
    "interleaved_1f1b": Schedule(interleaved_1f1b, most_stages=None, rounds=True),
    "looped_bfs": Schedule(looped_bfs, most_stages=None),
    "interleaved_zb": Schedule(interleaved_zb, most_stages=None, splits_backward=True),
    "zb_h1": Schedule(zb_h1, splits_backward=True),
    "zbv": Schedule(zbv, 2, 2, v_shaped=True, splits_backward=True),
    "dualpipev": Schedule(dualpipev, 2, 2, v_shaped=True, splits_backward=True),
}
