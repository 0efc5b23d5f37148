"""What sharded data parallel moves and holds; that its numbers are one rank's is in tests/test_parity.py."""

import pytest

from tests.parallelism.conftest import Measure, num_parameters

AMONG_TIED = ("embedding", "position_embedding", "norm", "head")  # one unit of gpt2_even
WORDS = 4  # parameter, gradient, two moments; float32 each


def test_parameters_are_gathered_twice_and_gradients_scattered_once(measure: Measure) -> None:
    """3(n-1)/n of the parameters; 2(n-1)/n of the unit at the ends, which stays from the forward to the backward."""
    measured = measure("gpt2_even", dp=2, dp_shard=2)
    ends = num_parameters("gpt2_even", *AMONG_TIED)
    assert measured["gathered"] == 2 * num_parameters("gpt2_even", "blocks") + ends
    assert measured["scattered"] == num_parameters("gpt2_even")
    assert measured["reduced"] == 0


def test_an_untied_embedding_is_a_unit_like_the_blocks(measure: Measure) -> None:
    """Padding apart: 11 rows of vocabulary are cut into 6 and 5."""
    measured = measure("gpt2_untied", dp=2, dp_shard=2)
    embedding, last = (num_parameters("gpt2_untied", *names) for names in (("embedding", "position"), ("norm", "head")))
    row = 48
    assert measured["gathered"] == 2 * (num_parameters("gpt2_untied", "blocks") + embedding + row) + last + row


def test_kept_parameters_are_gathered_and_their_gradients_scattered_once_a_step(measure: Measure) -> None:
    """ZeRO-2: 2(n-1)/n, however many micro-batches."""
    measured = measure("gpt2_even", 3, options={"reshard": False}, dp=2, dp_shard=2)
    assert measured["gathered"] == measured["scattered"] == num_parameters("gpt2_even")


@pytest.mark.parametrize("micro_batch", [pytest.param(6, marks=pytest.mark.slow), 2])
def test_replicas_reduce_one_shard_once_a_step(micro_batch: int, measure: Measure) -> None:
    """2(m-1)/m of a shard."""
    measured = measure("gpt2_even", micro_batch, dp=4, dp_shard=2)
    assert measured["reduced"] == num_parameters("gpt2_even") / 2


@pytest.mark.parametrize(
    ("dp", "dp_shard"), [pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow), (4, 2)]
)
def test_a_rank_holds_its_share_of_parameters_gradients_and_moments(dp: int, dp_shard: int, measure: Measure) -> None:
    measured = measure("llama", 6, dp=dp, dp_shard=dp_shard)
    assert measured["replicated_bytes"] == 0
    whole = num_parameters("llama") * WORDS * 4
    assert measured["sharded_bytes"] == pytest.approx(whole / dp_shard, rel=0.02)
