"""The held-out part: chosen by content, scored once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.held_out import IGNORED, choose_held_out, content_hash, held_out_windows

HASHES = st.lists(st.integers(0, 30) | st.integers(0, 2**64 - 1), min_size=1, max_size=60)
FRACTIONS = st.floats(0.001, 0.999)


@given(HASHES, FRACTIONS)
def test_equal_documents_stay_together_and_both_sides_have_some(values: list[int], fraction: float) -> None:
    held = choose_held_out(np.array(values, np.uint64), fraction)
    if len(set(values)) == 1:
        assert held is None
        return
    assert held is not None
    inside = {value for value, chosen in zip(values, held) if chosen}
    outside = {value for value, chosen in zip(values, held) if not chosen}
    assert inside
    assert outside
    assert max(inside) < min(outside)


@given(st.permutations(range(100)), st.integers(1, 99))
def test_the_fraction_and_the_order(values: list[int], percent: int) -> None:
    held = choose_held_out(np.array(values, np.uint64), percent / 100)
    assert held is not None
    assert {value for value, chosen in zip(values, held) if chosen} == set(range(percent))


def test_the_hash_is_of_the_text_alone() -> None:
    assert content_hash("text") == content_hash("te" + "xt") != content_hash("text ")
    assert 0 <= content_hash("text") < 2**64


@given(st.integers(0, 50), st.integers(1, 12))
def test_every_prediction_is_scored_once(size: int, seq_len: int) -> None:
    held_out = np.arange(100, 100 + size, dtype=np.uint16)
    inputs, targets = held_out_windows(held_out, seq_len)
    assert inputs.shape == targets.shape
    assert inputs.shape[1] == seq_len
    assert inputs.dtype == targets.dtype == np.int64
    valid = targets != IGNORED
    assert targets[valid].tolist() == held_out[1:].tolist()
    assert (inputs[valid] == targets[valid] - 1).all()
    assert valid.any(axis=1).all()  # no window is all padding
