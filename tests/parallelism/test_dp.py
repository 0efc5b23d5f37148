"""What data parallel moves; that its numbers are one rank's is in tests/test_parity.py."""

import pytest

from tests.parallelism.conftest import Measure, num_parameters


@pytest.mark.parametrize("micro_batch", [pytest.param(12, marks=pytest.mark.slow), 3])
def test_gradients_are_reduced_once_a_step_however_many_micro_batches(micro_batch: int, measure: Measure) -> None:
    """2(n-1)/n of the gradient: all-reduced elements, each of which a rank sends and gets (n-1)/n times."""
    measured = measure("gpt2", micro_batch, dp=2)
    assert measured["reduced"] == num_parameters("gpt2")
    assert measured["gathered"] == measured["scattered"] == 0


def test_one_rank_talks_to_nobody(measure: Measure) -> None:
    measured = measure("gpt2", 12)
    assert measured["reduced"] == measured["gathered"] == measured["scattered"] == 0
