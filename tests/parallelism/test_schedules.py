"""Schedules on paper: every slot once, in an order that can run, with the bubble and the memory of the papers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelism.schedules import INTERLEAVED, SCHEDULES, SPLIT_BACKWARD, Slot, in_flight, simulate
from parallelism.timeline import UNIT, Span, bubble, draw, on_paper, theoretical_bubble


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(2, 8), st.integers(1, 6), st.integers(1, 3))
def test_every_slot_comes_once_and_no_rank_waits_for_ever(schedule: str, p: int, rounds: int, v: int) -> None:
    v, m = (v if schedule in INTERLEAVED else 1), p * rounds
    orders = SCHEDULES[schedule](p, m, v)
    kinds = "FIW" if schedule in SPLIT_BACKWARD else "FB"
    for rank, order in enumerate(orders):
        stages = range(rank, p * v, p)
        expected = {Slot(stage, kind, k) for stage in stages for kind in kinds for k in range(m)}
        assert len(order) == len(expected)
        assert set(order) == expected
    simulate(orders, UNIT)  # ValueError if they can't be carried out


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 16)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_bubble_on_paper_is_the_closed_form(schedule: str, p: int, m: int, v: int) -> None:
    if v == 1 or schedule in INTERLEAVED:
        found = bubble(on_paper(SCHEDULES[schedule](p, m, v)))
        assert found == pytest.approx(theoretical_bubble(schedule, p, m, v), abs=1e-12)


def test_figures_of_the_papers() -> None:
    """4 stages and 4 micro-batches: 57.1% use with 1F1B, 25% one at a time; ZB-H1 idles p - 1 forwards a rank."""
    assert 1 - bubble(on_paper(SCHEDULES["1f1b"](4, 4, 1))) == pytest.approx(4 / 7)
    assert 1 - bubble(on_paper(SCHEDULES["naive"](4, 4, 1))) == pytest.approx(0.25)
    spans = on_paper(SCHEDULES["zb_h1"](4, 12, 1))
    assert max(span.end for span in spans) - 3 * 12 == pytest.approx(4 - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 3)])
def test_micro_batches_in_flight(p: int, m: int) -> None:
    def most(schedule: str) -> list[int]:
        return [in_flight(order) for order in SCHEDULES[schedule](p, m, 1)]

    assert most("1f1b") == [min(m, p - rank) for rank in range(p)]
    assert most("gpipe") == [m] * p
    assert most("naive") == [1] * p
    assert max(most("zb_h1")) <= p


def test_orders_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="no rank can go on"):
        simulate([[Slot(0, "B", 0), Slot(0, "F", 0)], [Slot(1, "F", 0), Slot(1, "B", 0)]], UNIT)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    spans = [Span(0, Slot(0, "F", 0), 0.0, 1.0), Span(1, Slot(1, "B", 0), 2.0, 4.0)]
    assert bubble(spans) == pytest.approx(1 - 3 / 8)
    draw(spans, tmp_path / "timeline.png", "two slots")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
