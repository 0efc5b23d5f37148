"""Pipeline schedules whose backward comes in halves: the one for the weights waits until a rank would idle.

Functions of p ranks, m micro-batches and v stages a rank, as in schedules.py. Imports no torch.

In the first stage torch's runtime computes nothing in I and all of the backward in W, since no rank waits for its I: a
measured timeline shows that, and the bubble stays what it is.
"""

from collections import deque
from collections.abc import Callable, Iterable

from parallelism.slots import Orders, Slot, ready_at, stages_of

Move = tuple[str, int]  # a kind of work and which of the rank's stages does it


def zb_h1(p: int, m: int, v: int) -> Orders:
    """1F1B whose backward of the weights is put off (Qi et al. 2023, section 2.1, ZB-H1).

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


def interleaved_zb(p: int, m: int, v: int) -> Orders:
    """Interleaved stages whose ranks do what is ready: a backward of inputs, else a forward, else one of weights.

    No more forwards are in flight than on the first rank of interleaved 1F1B. As the Zero Bubble paper does (Qi et al.
    2023, section 3.1), it tries some rules for which forward comes first, and takes the one that ends first.
    """
    if v == 1:
        return zb_h1(p, m, v)
    by_rounds = {(k, chunk): k // p * v + chunk for k in range(m) for chunk in range(v)}  # as interleaved 1F1B
    staggered = {(k, chunk): 2 * k + p * chunk for k in range(m) for chunk in range(v)}
    return min((_greedy(p, m, v, rule) for rule in (by_rounds, staggered)), key=lambda found: found[1])[0]


def _greedy(p: int, m: int, v: int, forward_order: dict[tuple[int, int], int]) -> tuple[Orders, int]:
    """The orders, and when they end, if F, I and W take 1 each; `forward_order` of (micro-batch, chunk), least first.

    The first stage has its backward whole, since no rank waits for the gradient of its inputs.
    """
    limit = 2 * (p - 1) + (v - 1) * p + 1
    stages = [stages_of(rank, p, v) for rank in range(p)]
    orders: Orders = [[] for _ in range(p)]
    held, free, ends = [0] * p, [0] * p, dict[Slot, float]()
    done = {(stage, kind): 0 for stage in range(p * v) for kind in "FBIW"}

    def choose(rank: int, now: int) -> Slot | None:
        choices = []
        for chunk, stage in enumerate(stages[rank]):
            room = limit - (v - 1 - chunk)  # a forward must leave room for those after it, or none would come back
            for kind, urgency in {"F": 1, "B": 2}.items() if stage == 0 else {"I": 0, "F": 1, "W": 2}.items():
                k = done[stage, kind]
                if k == m or (kind == "F" and held[rank] >= room):
                    continue
                ready = ready_at(Slot(stage, kind, k), p * v - 1, ends)
                if ready is not None and ready <= now:
                    rule = forward_order[k, chunk] if kind == "F" else k
                    choices.append((urgency, rule, chunk, Slot(stage, kind, k)))
        return min(choices, key=lambda choice: choice[:3])[-1] if choices else None

    now = 0
    while len(ends) < m * (3 * p * v - 1):
        chosen = [choose(rank, now) if free[rank] <= now else None for rank in range(p)]
        for rank, slot in enumerate(chosen):
            if slot is not None:
                orders[rank].append(slot)
                ends[slot] = free[rank] = now + (2 if slot.kind == "B" else 1)
                done[slot.stage, slot.kind] += 1
                held[rank] += {"F": 1, "B": -1, "I": 0, "W": -1}[slot.kind]
        now += 1
    return orders, max(free)


def zbv(p: int, m: int, v: int) -> Orders:
    """Two stages a rank, there and back, so that the first rank has the loss and starts backward at once.

    Qi et al. 2023, section 6 (ZB-V): with 2 p micro-batches or more, and F, I and W equally long, no rank waits between
    its first slot and its last, and as much is in flight on every rank as in 1F1B on the first: 2 p forwards of half a
    rank's layers.
    """

    def moves(rank: int) -> Iterable[Move]:
        down, up = p - rank, rank
        return [
            *[("F", 0)] * (2 * down - 1),
            *[("F", 1), ("F", 0)] * up,
            *[("F", 1), ("I", 1), ("W", 1)] * down,
            *[("F", 0), ("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)] * (m - p),
            *[("I", 0), ("I", 1)] * up,
            *[("I", 0), ("W", 0)] * down,
            *[("W", 1)] * up,
            *[("W", 0)] * up,
        ]

    return _in_v_shape(p, m, moves)


def dualpipev(p: int, m: int, v: int) -> Orders:
    """Two stages a rank, there and back; a forward of one is paired with a backward of the other.

    DeepSeek-V3, section 3.2.1, in the form with one copy of the parameters (DualPipeV, in the DualPipe repository). The
    pairs are made to overlap an expert's all-to-alls with compute; without experts the two run one after the other. As
    much is in flight as in ZB-V and one forward more.
    """

    def moves(rank: int) -> Iterable[Move]:
        below, above = p - 1 - rank, rank + 1
        ending: list[Move] = [("B", 1), ("B", 0)] * above
        ending[above:] = [("I", chunk) for _, chunk in ending[above:]]  # weights are put off from the middle on
        put_off: list[Move] = [("W", chunk) for kind, chunk in ending if kind == "I"] + [("W", 0)] * below
        return [
            *[("F", 0)] * (2 * below),
            *[("F", 0), ("F", 1)] * above,
            *[("I", 1), ("W", 1), ("F", 1)] * below,
            *[("F", 0), ("B", 1), ("F", 1), ("B", 0)] * (m - 2 * p + rank + 1),
            *[("B", 1), ("F", 1), ("B", 0)] * below,
            *ending,
            *[move for weights in put_off[:below] for move in (weights, ("I", 0))],
            *put_off[below:],
        ]

    return _in_v_shape(p, m, moves)


def _in_v_shape(p: int, m: int, moves: Callable[[int], Iterable[Move]]) -> Orders:
    """Each rank's moves as slots: those of a stage take the micro-batches in turn; what is over m is dropped."""
    orders: Orders = []
    for rank in range(p):
        order: list[Slot] = []
        stages = stages_of(rank, p, 2, v_shaped=True)
        forwards, backwards = ([iter(range(m)) for _ in stages] for _ in "FB")
        put_off: list[deque[int]] = [deque() for _ in stages]
        for kind, chunk in moves(rank):
            waiting = {"F": forwards[chunk], "W": iter(put_off[chunk])}.get(kind, backwards[chunk])
            micro_batch = next(waiting, None)
            if micro_batch is None:
                continue
            order.append(Slot(stages[chunk], kind, micro_batch))
            if kind == "I":
                put_off[chunk].append(micro_batch)
            if kind == "W":
                put_off[chunk].popleft()
        orders.append(order)
    return orders
