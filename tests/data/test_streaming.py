"""Datasets through `datasets`: cached and streamed give the same documents; a stream reads forwards."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import streaming
from data.corpus import Corpus, open_corpus
from data.errors import DataError
from data.stream import rank_batch, window_start
from data.streaming import ForwardStream
from tests.data.conftest import Configure
from tests.data.test_cache import DOCUMENTS, split, texts_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate([*DOCUMENTS, ""])]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("".join(rows))
    return tmp_path / "set"


def streamed_texts(corpus: Corpus) -> tuple[Counter[str], Counter[str]]:
    """As texts_of: the documents of the first epoch, which is as long as everything less the held-out part."""
    assert corpus.tokenizer is not None
    held_out = Counter(map(corpus.tokenizer.decode, split(corpus.held_out.tolist(), corpus.tokenizer.end)))
    size = sum(map(len, DOCUMENTS)) + len(DOCUMENTS) - len(corpus.held_out)
    train = split(corpus.train.read(0, size).tolist(), corpus.tokenizer.end)
    return Counter(map(corpus.tokenizer.decode, train)), held_out


def test_cached_and_streamed_hold_the_same_documents(configure: Configure, folder: Path) -> None:
    config = configure(source="hf", name=str(folder), tokenizer="bytes", held_out=0.2)
    train, held_out = texts_of(open_corpus(config, 300, seed=0))
    assert train + held_out == Counter(DOCUMENTS)
    assert held_out.total() == 8
    config.streaming = True
    train, held_out = streamed_texts(open_corpus(config, 300, seed=0))
    assert train + held_out == Counter(DOCUMENTS)
    assert not train & held_out
    assert held_out


def test_the_key_of_a_dataset(configure: Configure, folder: Path) -> None:
    config = configure(source="hf", name=str(folder), tokenizer="bytes")
    first = open_corpus(config, 300, seed=0)
    assert open_corpus(config, 300, seed=0).folder == first.folder
    (folder / "train.jsonl").write_text('{"text": "other"}\n{"text": "text"}\n')
    assert open_corpus(config, 300, seed=0).folder != first.folder


@pytest.mark.parametrize("splits", [True, False])
def test_a_dataset_that_was_saved_to_disk(configure: Configure, tmp_path: Path, splits: bool) -> None:
    saved = datasets.Dataset.from_dict({"text": DOCUMENTS})
    path = str(tmp_path / "saved")
    (datasets.DatasetDict(train=saved) if splits else saved).save_to_disk(path)
    config = configure(source="hf", name=path, tokenizer="bytes")
    train, held_out = texts_of(open_corpus(config, 300, seed=0))
    assert train + held_out == Counter(DOCUMENTS)
    config.streaming = True
    train, held_out = streamed_texts(open_corpus(config, 300, seed=0))
    assert train + held_out == Counter(DOCUMENTS)
    if splits:
        config.split = "validation"
        with pytest.raises(DataError, match=r"data.split=validation is not in .*saved; valid: train"):
            open_corpus(config, 300, seed=0)


@pytest.mark.parametrize("streamed", [False, True])
def test_datasets_that_cannot_be_used(configure: Configure, folder: Path, streamed: bool) -> None:
    def opened(**overrides: object) -> Corpus:
        base = {"source": "hf", "name": str(folder), "tokenizer": "bytes", "streaming": streamed}
        return open_corpus(configure(**{**base, **overrides}), 300, seed=0)

    with pytest.raises(DataError, match=rf"data.name={folder}/none\[train\] cannot be loaded: "):
        opened(name=f"{folder}/none")
    with pytest.raises(DataError, match=rf"data.name={folder}\[tst\] cannot be loaded: .*train"):
        opened(split="tst")
    with pytest.raises(DataError, match=rf"{folder}\[train\]: no column 'body' \(data.text_key\), only text, id"):
        opened(text_key="body")
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": null}\n{"text": "b"}\n{"text": null}\n')
    with pytest.raises(DataError, match=rf"{folder}\[train\]: row 2: 'text' is null \(data.bad_rows=skip"):
        opened()
    with pytest.raises(DataError, match=r"row 4: 'text' is null \(1 rows before it were skipped"):
        opened(bad_rows="skip", max_bad_rows=1)
    assert opened(bad_rows="skip").held_out.size == 2
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": oops}\n')
    with pytest.raises(DataError, match=rf"{folder}\[train\].* cannot be (loaded|read)"):
        opened()


def test_a_streamed_run_goes_on_where_it_was_stopped(configure: Configure, folder: Path) -> None:
    config = configure(source="hf", name=str(folder), streaming=True, held_out=0.2)
    streams = [open_corpus(config, 300, seed).train for seed in (1, 1, 1, 2)]
    for stream in streams:
        stream.stretch = 480
    whole = streams[0].read(0, 6000)  # several epochs
    assert streams[1].read(2500, 1000).tolist() == whole[2500:3500].tolist()
    for step in range(9):
        _, targets = rank_batch(streams[2], 4, step * 96, 12, 8, part=1, num_parts=3)
        numbers = range(step * 12 + 4, step * 12 + 8)  # the second third of the step's windows
        starts = [window_start(number, 8, streams[2].stretch, seed=4) for number in numbers]
        assert targets.tolist() == [streams[0].read(start + 1, 8).tolist() for start in starts]
    assert streams[3].read(0, 6000).tolist() != whole.tolist()


def test_epochs_are_shuffled_anew_and_whole(configure: Configure, folder: Path) -> None:
    config = configure(source="hf", name=str(folder), tokenizer="bytes", streaming=True)
    corpus = open_corpus(config, 300, seed=0)
    size = sum(map(len, DOCUMENTS)) + len(DOCUMENTS) - len(corpus.held_out)
    first, second = corpus.train.read(0, size).tolist(), corpus.train.read(size, size).tolist()
    assert first != second
    assert Counter(split(first, 256)) == Counter(split(second, 256))


@pytest.mark.parametrize("held_out", [1e-9, 0.999999999])
def test_a_small_streamed_dataset_has_both_sides(configure: Configure, folder: Path, held_out: float) -> None:
    config = configure(source="hf", name=str(folder), tokenizer="bytes", streaming=True, held_out=held_out)
    train, kept = streamed_texts(open_corpus(config, 300, seed=0))
    assert train + kept == Counter(DOCUMENTS)
    assert min(train.total(), kept.total()) == 1


def test_one_document_cannot_be_streamed(configure: Configure, folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    config = configure(source="hf", name=str(folder), tokenizer="bytes", streaming=True)
    with pytest.raises(DataError, match=r"1 documents are too few to stream; valid: data.streaming=false"):
        open_corpus(config, 300, seed=0)


def test_a_long_stream_is_known_by_its_first_documents(
    configure: Configure, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "FIRST_CHARS", 600)
    monkeypatch.setattr(streaming, "HELD_OUT_TOKENS", 50)
    config = configure(source="hf", name=str(folder), tokenizer="bytes", streaming=True, held_out=0.3)
    first = open_corpus(config, 300, seed=0)
    assert len(first.held_out) == 50
    assert first.bytes_per_token(first.held_out) == pytest.approx(1, abs=0.1)
    with (folder / "train.jsonl").open("a") as file:
        file.write('{"text": "one more document"}\n')
    assert open_corpus(config, 300, seed=0).folder == first.folder


def counting() -> Iterator[np.ndarray]:
    for start in range(0, 1000, 7):
        yield np.arange(start, start + 7, dtype=np.uint32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=9))
def test_forward_reads(steps: list[tuple[int, int]]) -> None:
    stream = ForwardStream(counting, stretch=0)
    start = 0
    for skip, length in steps:
        start += skip
        assert stream.read(start, length).tolist() == list(range(start, start + length))
    stream.read(start + 90, 1)
    with pytest.raises(ValueError, match="read forwards only"):
        stream.read(start, 1)
    stream.close()


def test_within_two_stretches_reads_come_in_any_order() -> None:
    stream = ForwardStream(counting, stretch=50)
    for start in (90, 0, 40, 95, 3, 180, 90, 199, 110, 300):
        assert stream.read(start, 9).tolist() == list(range(start, start + 9))
    with pytest.raises(ValueError, match="read forwards only"):
        stream.read(190, 9)
    stream.close()


def test_an_error_in_the_thread_reaches_every_reader() -> None:
    def failing() -> Iterator[np.ndarray]:
        yield np.arange(5)
        raise DataError("row 6: bad")

    stream = ForwardStream(failing)
    assert stream.read(0, 5).tolist() == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(DataError, match="row 6: bad"):
            stream.read(3, 5)


def test_the_thread_stays_a_bounded_amount_ahead_and_ends_with_its_stream() -> None:
    made = []

    def endless() -> Iterator[np.ndarray]:
        while True:
            made.append(1)
            yield np.zeros(10)

    stream = ForwardStream(endless)
    stream.read(0, 5)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "data"]
    thread.join(0.3)
    assert thread.is_alive()
    assert len(made) <= streaming.AHEAD + 2
    del stream
    thread.join(5)
    assert not thread.is_alive()
