"""What tensor parallel moves and holds; that its numbers are one rank's is in tests/test_parity.py."""

import pytest

from tests.cases import MODELS, SEQ_LEN, SEQUENCES
from tests.parallelism.conftest import Measure, num_parameters

ACTIVATIONS = SEQUENCES * SEQ_LEN * 48  # (B, T, C)
LAYERS = 2


def test_four_all_reduces_a_block(measure: Measure) -> None:
    """And one behind the embedding, one before the head; for the loss two numbers a token and rank."""
    measured = measure("gpt2", tp=2)
    assert measured["reduced"] == (4 * LAYERS + 2) * ACTIVATIONS
    assert measured["gathered"] == 2 * 2 * SEQUENCES * SEQ_LEN
    assert measured["scattered"] == 0


def test_sequence_parallelism_moves_the_same_in_other_collectives(measure: Measure) -> None:
    """An all-reduce is a reduce-scatter and an all-gather. Added: the replicated parameters' gradients, once, so few
    that every rank sends all of them to each."""
    measured = measure("gpt2", options={"sequence_parallel": True}, tp=2)
    norms, biases, positions = 2 * (2 * LAYERS + 1) * 48, 2 * LAYERS * 48, 32 * 48
    assert measured["scattered"] == (4 * LAYERS + 2) * ACTIVATIONS + 2 * (norms + biases + positions)
    assert measured["gathered"] == (4 * LAYERS + 2) * ACTIVATIONS + 2 * 2 * SEQUENCES * SEQ_LEN
    assert measured["reduced"] == 0


@pytest.mark.parametrize("tp", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_holds_its_share_of_what_is_split(tp: int, measure: Measure) -> None:
    measured = measure("llama", tp=tp)
    norms = (2 * LAYERS + 1) * 48
    assert measured["replicated_bytes"] == norms * 4 * 4
    assert measured["sharded_bytes"] == pytest.approx((num_parameters("llama") - norms) * 4 * 4 / tp, rel=0.02)


def test_kv_heads_that_ranks_cannot_share_out_are_replicated(measure: Measure) -> None:
    """6 kv heads on 4 ranks: all of k and v on each."""
    assert MODELS["llama"].num_kv_heads % 4
    measured = measure("llama", tp=4)
    kv_dim = 6 * 2
    replicated = (2 * LAYERS + 1) * 48 + LAYERS * 2 * kv_dim * 48
    assert measured["replicated_bytes"] == replicated * 4 * 4
    assert measured["reduced"] == (4 * LAYERS + 2) * ACTIVATIONS
    assert measured["scattered"] == 4 * LAYERS * 2 * kv_dim * 48  # k's and v's gradients, from each rank to each
