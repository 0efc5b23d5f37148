"""Schedules on paper: every slot once, in an order that can run, with the bubble and the memory of the papers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelism.schedules import SCHEDULES
from parallelism.slots import Slot, in_flight, rank_of, simulate, stages_of
from parallelism.timeline import UNIT, Span, bubble, draw, on_paper, theoretical_bubble


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_every_slot_comes_once_and_no_rank_waits_for_ever(name: str, p: int, m: int, v: int) -> None:
    schedule = SCHEDULES[name]
    v, m = (v if schedule.allows(v) else schedule.usual_stages), (m * p if schedule.rounds else m)
    orders = schedule.orders(p, m, v)
    for rank, order in enumerate(orders):
        stages = stages_of(rank, p, v, schedule.v_shaped)
        kinds = [(slot.kind, slot.stage, slot.micro_batch) for slot in order]
        assert len(set(kinds)) == len(kinds)
        for stage in stages:
            done = {kind: {k for each, where, k in kinds if (each, where) == (kind, stage)} for kind in "FBIW"}
            assert done["F"] == done["B"] | done["I"] == set(range(m))
            assert done["W"] == done["I"]
            assert not done["B"] & done["I"]
        assert {where for _, where, _ in kinds} == set(stages)
        assert schedule.splits_backward or not any(kind in "IW" for kind, _, _ in kinds)
    simulate(orders, UNIT)  # ValueError if they can't be carried out


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    assert [rank_of(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of(stage, 3, v_shaped=True) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert stages_of(1, 3, 2) == [1, 4]
    assert stages_of(0, 3, 2, v_shaped=True) == [0, 5]


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [
        (name, p, m, v)
        for name, schedule in SCHEDULES.items()
        for p, m in [(2, 2), (4, 4), (2, 8), (4, 16), (8, 16)]
        for v in (1, 2, 3)
        if schedule.allows(v) and m >= p * (2 if schedule.v_shaped else 1)
    ],
)
def test_the_bubble_on_paper_is_the_closed_form(name: str, p: int, m: int, v: int) -> None:
    found = bubble(on_paper(SCHEDULES[name].orders(p, m, v)))
    assert found == pytest.approx(theoretical_bubble(name, p, m, v), abs=1e-12)


def test_figures_of_the_papers() -> None:
    """4 stages and 4 micro-batches: 57.1% use with 1F1B, 25% one at a time; ZB-H1 idles p - 1 forwards a rank."""
    assert 1 - bubble(on_paper(SCHEDULES["1f1b"].orders(4, 4, 1))) == pytest.approx(4 / 7)
    assert 1 - bubble(on_paper(SCHEDULES["naive"].orders(4, 4, 1))) == pytest.approx(0.25)
    spans = on_paper(SCHEDULES["zb_h1"].orders(4, 12, 1))
    assert max(span.end for span in spans) - 3 * 12 == pytest.approx(4 - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 3)])
def test_forwards_in_flight(p: int, m: int) -> None:
    def most(schedule: str, v: int = 1) -> list[int]:
        return [in_flight(order) for order in SCHEDULES[schedule].orders(p, m, v)]

    assert most("1f1b") == [min(m, p - rank) for rank in range(p)]
    assert most("gpipe") == [m] * p
    assert most("looped_bfs", 2) == [2 * m] * p
    assert most("naive") == [1] * p
    assert max(most("zb_h1")) <= p
    assert max(most("zbv", 2)) <= 2 * p
    assert max(most("dualpipev", 2)) <= 2 * p + 1
    assert max(most("interleaved_zb", 2)) <= 2 * (p - 1) + p + 1
    if m % p == 0:
        assert most("interleaved_1f1b", 2)[0] == min(2 * m, 2 * (p - 1) + p + 1)


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="no rank can go on"):
        simulate([[Slot(0, "B", 0), Slot(0, "F", 0)], [Slot(1, "F", 0), Slot(1, "B", 0)]], UNIT)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    spans = [Span(0, Slot(0, "F", 0), 0.0, 1.0), Span(1, Slot(1, "B", 0), 2.0, 4.0)]
    assert bubble(spans) == pytest.approx(1 - 3 / 8)
    draw(spans, tmp_path / "timeline.png", "two slots")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
