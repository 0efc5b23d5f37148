"""Pipeline schedules: in which order each rank computes which micro-batch of which stage. Imports no torch.

p ranks, m micro-batches, v stages a rank; stage s lies on rank s % p. Each schedule is a function of these three that
gives every rank's order; training runs it, and the planner draws it.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One piece of work: F forward, B backward, or its two halves, I for the inputs and W for the weights."""

    stage: int
    kind: str
    micro_batch: int


Orders = list[list[Slot]]  # of each rank


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
    """All forwards, then all backwards (Huang et al. 2019, section 2.3)."""
    return [
        [Slot(rank, "F", micro_batch) for micro_batch in range(m)]
        + [Slot(rank, "B", micro_batch) for micro_batch in range(m)]
        for rank in range(p)
    ]


def interleaved_1f1b(p: int, m: int, v: int) -> Orders:
    """One forward, one backward in turn, as soon as there is a backward to do; m has to divide by p where v is above 1.

    Narayanan et al. 2021, section 2.2. The k-th forward of a rank is of chunk k // p % v: p micro-batches go through
    a chunk, then through the next.
    """
    orders = []
    for rank in range(p):
        forwards = [Slot(k // p % v * p + rank, "F", k // (p * v) * p + k % p) for k in range(m * v)]
        backwards = [Slot((v - 1 - k // p % v) * p + rank, "B", k // (p * v) * p + k % p) for k in range(m * v)]
        if v == 1:
            forwards = [Slot(rank, "F", k) for k in range(m)]
            backwards = [Slot(rank, "B", k) for k in range(m)]
        ahead = min(m * v, p - rank - 1 if v == 1 else (p - rank - 1) * 2 + (v - 1) * p)
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards):
            order += [forward, backward]
        orders.append(order + backwards[m * v - ahead :])
    return orders


def zb_h1(p: int, m: int, v: int) -> Orders:
    """1F1B whose backward comes in two halves; that of the weights is put off (Qi et al. 2023, section 2.1, ZB-H1).

    Rank r starts with p - r forwards and lags r micro-batches behind with the weights, which then fill its wait for
    the last stages at the end; so p micro-batches are in flight on every rank, as in 1F1B on the first.
    """
    orders = []
    for rank in range(p):
        ahead = min(m, p - rank)
        order = [Slot(rank, "F", k) for k in range(ahead)]
        for k in range(m):
            order.append(Slot(rank, "I", k))
            if k >= rank:
                order.append(Slot(rank, "W", k - rank))
            if ahead + k < m:
                order.append(Slot(rank, "F", ahead + k))
        orders.append(order + [Slot(rank, "W", k) for k in range(max(0, m - rank), m)])
    return orders


SCHEDULES: dict[str, Callable[[int, int, int], Orders]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": interleaved_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
}
INTERLEAVED = ("interleaved_1f1b",)  # that take several stages a rank
SPLIT_BACKWARD = ("zb_h1",)  # whose backward comes in two halves


def in_flight(order: list[Slot]) -> int:
    """The most micro-batches whose activations a rank holds at a time."""
    held = most = 0
    for slot in order:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[slot.kind]
        most = max(most, held)
    return most


def simulate(orders: Orders, seconds: dict[str, float]) -> dict[Slot, float]:
    """When each slot ends, if communication takes no time. ValueError: the orders wait for each other for ever."""
    last = max(slot.stage for order in orders for slot in order)
    end: dict[Slot, float] = {}
    clocks, heads = [0.0] * len(orders), [0] * len(orders)
    while any(head < len(order) for head, order in zip(heads, orders)):
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order):
                slot = order[heads[rank]]
                ready = [end.get(needed, -1.0) for needed in _needs(slot, last)]
                if min(ready, default=0.0) < 0:
                    break
                clocks[rank] = max([clocks[rank], *ready]) + seconds[slot.kind]
                end[slot] = clocks[rank]
                heads[rank] += 1
                moved = True
        if not moved:
            raise ValueError(
                f"no rank can go on: {[order[head] for head, order in zip(heads, orders) if head < len(order)]}"
            )
    return end


def _needs(slot: Slot, last: int) -> list[Slot]:
    """The slots that have to end before this one begins."""
    if slot.kind == "F":
        return [Slot(slot.stage - 1, "F", slot.micro_batch)] if slot.stage else []
    if slot.kind == "W":
        return [Slot(slot.stage, "I", slot.micro_batch)]
    if slot.stage == last:
        return [Slot(slot.stage, "F", slot.micro_batch)]
    halves = Slot(slot.stage + 1, "I", slot.micro_batch)
    return [halves if slot.kind == "I" else Slot(slot.stage + 1, "B", slot.micro_batch)]
