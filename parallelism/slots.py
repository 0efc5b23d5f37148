"""What pipeline schedules are made of: slots of work, the rank of each stage, and who waits for whom. Imports no torch.

p ranks, m micro-batches, v stages a rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One piece of work: F forward, B backward, or its two halves, I for the inputs and W for the weights."""

    stage: int
    kind: str
    micro_batch: int


Orders = list[list[Slot]]  # of each rank


def rank_of(stage: int, p: int, v_shaped: bool = False) -> int:
    """The rank that has a stage: stages go round the ranks, or there and back, so that the first rank has the last."""
    lap, place = divmod(stage, p)
    return p - 1 - place if v_shaped and lap % 2 else place


def stages_of(rank: int, p: int, v: int, v_shaped: bool = False) -> list[int]:
    """The stages that a rank has, the first first."""
    return [stage for stage in range(p * v) if rank_of(stage, p, v_shaped) == rank]


def needs(slot: Slot, last: int) -> list[Slot]:
    """The slots that have to end before this one begins, where `last` is the last stage.

    A backward needs that of the next stage, or at least its half for the inputs, whichever the order has.
    """
    if slot.kind == "F":
        return [Slot(slot.stage - 1, "F", slot.micro_batch)] if slot.stage else []
    if slot.kind == "W":
        return [Slot(slot.stage, "I", slot.micro_batch)]
    if slot.stage == last:
        return [Slot(slot.stage, "F", slot.micro_batch)]
    return [Slot(slot.stage + 1, kind, slot.micro_batch) for kind in "BI"]


def ready_at(slot: Slot, last: int, ends: dict[Slot, float]) -> float | None:
    """When a slot can begin, from the ends of those before; None: one of those that it needs is not done."""
    needed = needs(slot, last)
    times = [ends[before] for before in needed if before in ends]
    return max(times, default=0.0) if times or not needed else None


def simulate(orders: Orders, seconds: dict[str, float]) -> dict[Slot, float]:
    """When each slot ends, if communication takes no time. ValueError: the orders wait for each other for ever."""
    last = max(slot.stage for order in orders for slot in order)
    ends: dict[Slot, float] = {}
    clocks, heads = [0.0] * len(orders), [0] * len(orders)
    while any(head < len(order) for head, order in zip(heads, orders)):
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order):
                slot = order[heads[rank]]
                ready = ready_at(slot, last, ends)
                if ready is None:
                    break
                clocks[rank] = ends[slot] = max(clocks[rank], ready) + seconds[slot.kind]
                heads[rank] += 1
                moved = True
        if not moved:
            waiting = [order[head] for head, order in zip(heads, orders) if head < len(order)]
            raise ValueError(f"no rank can go on: {waiting}")
    return ends


def in_flight(order: list[Slot]) -> int:
    """The most forwards whose activations a rank holds at a time, over all its stages."""
    held = most = 0
    for slot in order:
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[slot.kind]
        most = max(most, held)
    return most
