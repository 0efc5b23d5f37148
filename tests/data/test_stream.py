"""The stream is a pure function of seed and position; the parts of a step are that step whatever their number."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.stream import Stream, next_place, rank_batch, window_start

END = 0
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=12)


def stream_of(lengths: list[int], seed: int = 0, skip: int = 0) -> Stream:
    """Documents of so many tokens, all different, each with an end token; the first `skip` are not trained on."""
    documents, token = [], 1
    for length in lengths:
        documents.append([*range(token, token + length), END])
        token += length
    offsets = np.cumsum([0, *map(len, documents)])
    tokens = np.array([token for document in documents for token in document], np.uint16)
    return Stream(tokens, offsets, np.arange(skip, len(lengths)), seed)


@given(LENGTHS, st.integers(0, 200), st.integers(0, 60), st.integers(0, 60))
def test_reads_join(lengths: list[int], start: int, n: int, m: int) -> None:
    stream = stream_of(lengths)
    joined = np.concatenate([stream.read(start, n), stream.read(start + n, m)])
    fresh = stream_of(lengths).read(start, n + m)
    assert joined.dtype == fresh.dtype == np.int64
    assert joined.tolist() == fresh.tolist()


@given(LENGTHS, st.integers(0, 1000), st.data())
def test_every_epoch_holds_every_document_once_and_whole(lengths: list[int], epoch: int, data: st.DataObject) -> None:
    skip = data.draw(st.integers(0, len(lengths) - 1))
    stream = stream_of(lengths, seed=3, skip=skip)
    size = stream.tokens_per_epoch
    assert size == sum(lengths[skip:]) + len(lengths) - skip
    tokens = stream.read(epoch * size, size).tolist()
    order = np.random.default_rng([3, epoch]).permutation(len(lengths) - skip)
    first = np.cumsum([1, *lengths])
    expected = []
    for document in order + skip:
        expected += [*range(first[document], first[document] + lengths[document]), END]
    assert tokens == expected


def test_epochs_and_seeds_differ() -> None:
    lengths = [3] * 20
    first, second = stream_of(lengths, 1), stream_of(lengths, 2)
    size = first.tokens_per_epoch
    assert first.read(0, size).tolist() != first.read(size, size).tolist()
    assert first.read(0, size).tolist() != second.read(0, size).tolist()
    assert Counter(first.read(0, size).tolist()) == Counter(second.read(7 * size, size).tolist())


@given(LENGTHS, st.integers(0, 300), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(1, 9))
def test_the_parts_are_the_whole(lengths: list[int], step: int, parts: int, seq_len: int) -> None:
    stream, consumed = stream_of(lengths), step * 12 * seq_len
    inputs, targets = rank_batch(stream, 5, consumed, 12, seq_len)
    assert inputs[:, 1:].tolist() == targets[:, :-1].tolist()
    split = [rank_batch(stream_of(lengths), 5, consumed, 12, seq_len, part, parts) for part in range(parts)]
    assert np.concatenate([part[0] for part in split]).tolist() == inputs.tolist()
    assert np.concatenate([part[1] for part in split]).tolist() == targets.tolist()


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 9), st.integers(0, 5))
def test_every_stretch_holds_every_window_once(seq_len: int, stretch: int, index: int, seed: int) -> None:
    count = max(1, stretch // seq_len)
    starts = [window_start(index * count + place, seq_len, stretch, seed) for place in range(count)]
    assert sorted(starts) == [(index * count + place) * seq_len for place in range(count)]


def test_windows_are_shuffled_by_the_seed_and_read_where_they_start() -> None:
    stream = stream_of([7] * 100)
    starts = [window_start(number, 4, stream.stretch, seed=1) for number in range(48)]
    assert starts != sorted(starts)
    assert starts != [window_start(number, 4, stream.stretch, seed=2) for number in range(48)]
    inputs, targets = rank_batch(stream, 1, 0, 48, 4)
    assert inputs.tolist() == [stream.read(start, 4).tolist() for start in starts]
    assert targets.tolist() == [stream.read(start + 1, 4).tolist() for start in starts]
    # A batch of another size goes through the same windows.
    halves = [rank_batch(stream, 1, consumed, 24, 4)[0] for consumed in (0, 96)]
    assert np.concatenate(halves).tolist() == inputs.tolist()


def test_a_step_that_does_not_divide() -> None:
    with pytest.raises(AssertionError, match="12 sequences do not divide into 5 parts"):
        rank_batch(stream_of([3]), 0, 0, 12, 4, 0, 5)


def test_far_into_a_large_run() -> None:
    stream = stream_of([5, 3])
    start = 10**15 + 1
    assert stream.read(start, 40).tolist() == stream.read(start - 3, 43).tolist()[3:]


def test_threads_read_the_same() -> None:
    stream = stream_of([4] * 50)
    starts = [(index * 977) % 5000 for index in range(400)]
    expected = [stream_of([4] * 50).read(start, 30).tolist() for start in starts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda start: stream.read(start, 30).tolist(), starts))
    assert found == expected


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4), st.integers(1, 40))
def test_where_the_length_changes_no_token_is_taken_twice(spans: list[tuple[int, int]], stretch: int) -> None:
    """Spans of (seq_len, number of windows), each consumed to its end before the next begins."""
    place = 0
    taken: list[int] = []
    for seq_len, count in spans:
        for number in range(count):
            start = place + window_start(number, seq_len, stretch, 7)
            taken += range(start, start + seq_len)
        place = next_place(place, seq_len * count, seq_len, stretch)
    assert len(set(taken)) == len(taken)


def test_a_span_reads_windows_from_its_place_on() -> None:
    stream = stream_of([7] * 100)
    whole = [rank_batch(stream, 1, consumed, 3, 5, begin=36, place=80)[0] for consumed in range(36, 96, 15)]
    starts = [80 + window_start(number, 5, stream.stretch, 1) for number in range(12)]
    assert np.concatenate(whole).tolist() == [stream.read(start, 5).tolist() for start in starts]
