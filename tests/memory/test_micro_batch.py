import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory.config import MemoryConfig
from memory.micro_batch import AUTO_TOKENS, split_batch


@given(
    seq_len=st.integers(1, 5000),
    per_rank=st.integers(1, 60),
    num_parts=st.integers(1, 9),
    micro_batch=st.integers(1, 60),
)
def test_the_shape_multiplies_out(seq_len: int, per_rank: int, num_parts: int, micro_batch: int) -> None:
    tokens = seq_len * per_rank * num_parts
    auto = split_batch(tokens=tokens, seq_len=seq_len, micro_batch="auto", num_parts=num_parts)
    assert auto.tokens == auto.seq_len * auto.micro_batch * auto.num_micro_batches * auto.num_parts == tokens
    assert auto.micro_batch == 1 or auto.micro_batch * seq_len <= AUTO_TOKENS
    if per_rank % micro_batch == 0:
        shape = split_batch(tokens=tokens, seq_len=seq_len, micro_batch=micro_batch, num_parts=num_parts)
        assert shape.num_micro_batches == per_rank // micro_batch
    else:
        with pytest.raises(ValueError, match="does not divide"):
            split_batch(tokens=tokens, seq_len=seq_len, micro_batch=micro_batch, num_parts=num_parts)


def test_auto_takes_the_largest_that_fits() -> None:
    assert split_batch(tokens=8192 * 6, seq_len=1024, micro_batch="auto", num_parts=2).micro_batch == 8
    assert split_batch(tokens=16 * 256, seq_len=256, micro_batch="auto", num_parts=1).micro_batch == 16


def test_a_batch_of_any_size_is_answered_at_once() -> None:
    assert split_batch(tokens=10**30, seq_len=100, micro_batch="auto", num_parts=1).micro_batch == 80


def test_the_message_has_the_nearest_batches_and_they_are_valid() -> None:
    with pytest.raises(ValueError, match=re.escape("batch.seq_len=256 * memory.micro_batch=2 * dp=3 = 1536")) as error:
        split_batch(tokens=5000, seq_len=256, micro_batch=2, num_parts=3)
    assert "nearest valid: batch.tokens=4608 or 6144" in str(error.value)
    for tokens in (4608, 6144):
        split_batch(tokens=tokens, seq_len=256, micro_batch=2, num_parts=3)


def test_fewer_sequences_than_ranks() -> None:
    with pytest.raises(ValueError, match=r"nearest valid: batch\.tokens=2048$"):
        split_batch(tokens=100, seq_len=256, micro_batch="auto", num_parts=8)
    with pytest.raises(ValueError, match=r"nearest valid: batch\.tokens=8192, or dp=6$"):
        split_batch(tokens=3072, seq_len=256, micro_batch=2, num_parts=16)
    for tokens, num_parts in ((8192, 16), (3072, 6)):
        split_batch(tokens=tokens, seq_len=256, micro_batch=2, num_parts=num_parts)


@pytest.mark.parametrize("value", [0, -1, "many"])
def test_settings_out_of_range(value: int | str) -> None:
    with pytest.raises(ValueError, match=f"memory.micro_batch={value} must be auto or a number of at least 1"):
        MemoryConfig(value, "none", [])
