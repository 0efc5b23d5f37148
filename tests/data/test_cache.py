"""Tokens are cached once, whole, under a key of content and tokenizer."""

import json
import logging
import multiprocessing
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers

from data import cache, encode
from data.cache import prepare, token_type
from data.config import DataConfig
from data.corpus import Corpus, load_corpus, open_corpus, prepare_corpus
from data.errors import DataError
from data.folder import read_meta
from data.stream import Stream
from data.tokenizer import Tokenizer, train_bpe
from tests.data.conftest import Configure

Texts = Callable[..., str]
DOCUMENTS = [f"document {number}: {'word ' * (number % 7)}\n" for number in range(40)]


def split(tokens: list[int], end: int) -> list[tuple[int, ...]]:
    documents: list[tuple[int, ...]] = []
    start = 0
    for position, token in enumerate(tokens):
        if token == end:
            documents.append(tuple(tokens[start:position]))
            start = position + 1
    assert start == len(tokens)
    return documents


def texts_of(corpus: Corpus) -> tuple[Counter[str], Counter[str]]:
    """The training and the held-out documents, decoded."""
    assert corpus.tokenizer is not None
    assert corpus.num_train_tokens is not None
    end, decode = corpus.tokenizer.end, corpus.tokenizer.decode
    train = split(corpus.train.read(0, corpus.num_train_tokens).tolist(), end)
    return Counter(map(decode, train)), Counter(map(decode, split(corpus.held_out.tolist(), end)))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_train_and_held_out_are_apart_and_together_everything(
    configure: Configure, texts: Texts, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARS", 200)
    documents = [*DOCUMENTS, *DOCUMENTS[:5], f"<|endoftext|> {'x' * 3000}"]
    corpus = open_corpus(configure(source="files", path=texts(*documents), tokenizer=tokenizer), 300, seed=0)
    train, held_out = texts_of(corpus)
    assert train + held_out == Counter(documents)
    assert not train & held_out
    assert 3 <= held_out.total() <= 6  # ceil(0.05 * 46), and the twins of those
    assert (
        held_out.keys()
        == texts_of(open_corpus(configure(source="files", path=texts(), held_out=0.05), 300, 9))[1].keys()
    )


def test_the_held_out_choice_depends_on_the_documents_alone(configure: Configure, tmp_path: Path) -> None:
    rows = [json.dumps({"text": text, "body": text}) + "\n" for text in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    for number, part in enumerate([rows[25:], rows[:25]]):
        (tmp_path / f"part{number}.jsonl").write_text("".join(reversed(part)))
    first = open_corpus(configure(source="files", path=str(tmp_path / "a.jsonl")), 300, seed=0)
    second = open_corpus(configure(source="files", path=str(tmp_path / "part*"), text_key="body"), 300, seed=5)
    assert first.folder != second.folder
    assert first.held_out.tolist() == second.held_out.tolist()
    assert first.num_train_tokens == second.num_train_tokens


def test_one_document_is_divided_by_tokens(configure: Configure, texts: Texts) -> None:
    text = "".join(f"line {number}\n" for number in range(1000))
    corpus = open_corpus(configure(source="files", path=texts(text), tokenizer="bytes", held_out=0.1), 300, seed=0)
    assert corpus.num_train_tokens is not None
    train = corpus.train.read(0, corpus.num_train_tokens).tolist()
    assert train[-1] == corpus.held_out[-1] == 256
    assert bytes(train[:-1]) + bytes(corpus.held_out[:-1].tolist()) == text.encode()
    assert len(corpus.held_out) == pytest.approx(0.1 * len(text), abs=2)
    assert corpus.bytes_per_token(corpus.held_out) == pytest.approx(1, abs=0.01)
    assert open_corpus(configure(source="files", path=texts(text)), 300, 0).num_train_tokens is not None


def test_copies_of_one_document_too(configure: Configure, texts: Texts) -> None:
    corpus = open_corpus(configure(source="files", path=texts("abc", "abc"), tokenizer="bytes"), 300, seed=0)
    assert corpus.train.read(0, 7).tolist() == [*b"abc", 256, *b"ab", 256]
    assert corpus.held_out.tolist() == [*b"c", 256]


def test_too_little_text(configure: Configure, texts: Texts) -> None:
    with pytest.raises(DataError, match="2 tokens are too few"):
        prepare(configure(source="files", path=texts("a"), tokenizer="bytes"), 300)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_no_text_at_all(configure: Configure, tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3 + "oops\n")
    config = configure(source="files", path=str(tmp_path / "a.jsonl"), tokenizer=tokenizer, bad_rows="skip")
    with pytest.raises(DataError, match=r"a.jsonl: no text in it \(3 empty documents, 1 skipped rows\)"):
        prepare(config, 300)


def test_bytes_per_token(configure: Configure, texts: Texts) -> None:
    corpus = open_corpus(configure(source="files", path=texts("\u00e9" * 99, "abc"), tokenizer="bytes"), 300, seed=0)
    size = len(corpus.held_out)
    assert corpus.bytes_per_token(corpus.held_out) == pytest.approx((size - 1) / size)


def word_tokenizer(path: Path, last_id: int) -> str:
    model = Model(models.WordLevel({"document": 5, "<unk>": 6, "</s>": last_id}, "<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(path))
    return str(path)


@pytest.mark.parametrize(("last_id", "dtype"), [(65535, np.uint16), (65536, np.uint32)])
def test_16_or_32_bits(configure: Configure, texts: Texts, tmp_path: Path, last_id: int, dtype: type) -> None:
    spec = word_tokenizer(tmp_path / "tokenizer.json", last_id)
    config = configure(source="files", path=texts(*DOCUMENTS), tokenizer=spec)
    corpus = open_corpus(config, vocab_size=last_id + 1, seed=0)
    assert token_type(last_id + 1) is dtype
    assert isinstance(corpus.train, Stream)
    assert corpus.train.tokens.dtype == corpus.held_out.dtype == dtype
    assert corpus.train.read(0, 10).max() == last_id

    message = (
        f"model.vocab_size={last_id} is smaller than the tokenizer's {last_id + 1} entries .*valid: .* >= {last_id + 1}"
    )
    with pytest.raises(DataError, match=message):
        prepare(config, vocab_size=last_id)
    with pytest.raises(DataError, match=message):
        load_corpus(config, last_id, 0, corpus.folder)


def test_a_second_start_reads_the_cache(configure: Configure, texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    path = texts(*DOCUMENTS)
    for file in Path(path).parent.iterdir():
        os.utime(file, (1, 1))
    config = configure(source="files", path=path)
    folder = prepare(config, 300)
    changed = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    for name in ("train_bpe", "encode_documents"):
        monkeypatch.setattr(cache, name, lambda *_: pytest.fail("tokenized again"))
    monkeypatch.setattr("data.files.hashlib.file_digest", lambda *_: pytest.fail("read again"))
    assert prepare(config, 300) == folder
    assert {file: file.stat().st_mtime_ns for file in folder.iterdir()} == changed


def test_what_makes_a_new_key(configure: Configure, texts: Texts) -> None:
    path = texts(*DOCUMENTS)
    folder = prepare(configure(source="files", path=path), 300)
    assert prepare(configure(source="files", path=path, workers=1), 300) == folder
    others = [
        prepare(configure(source="files", path=path), 301),
        prepare(configure(source="files", path=path, tokenizer="bytes"), 300),
        prepare(configure(source="files", path=path, held_out=0.1), 300),
        prepare(configure(source="files", path=path, bad_rows="skip"), 300),
        prepare(configure(source="files", path=texts("another first document")), 300),
    ]
    assert len({folder, *others}) == 6


def test_a_cut_token_file_is_written_again(configure: Configure, texts: Texts) -> None:
    config = configure(source="files", path=texts(*DOCUMENTS))
    corpus = open_corpus(config, 300, seed=0)
    assert corpus.folder is not None
    tokens = (corpus.folder / "tokens.bin").read_bytes()
    (corpus.folder / "tokens.bin").write_bytes(tokens[:-2])
    with pytest.raises(DataError, match="is damaged or gone; start again"):
        load_corpus(config, 300, 0, corpus.folder)
    assert prepare(config, 300) == corpus.folder
    assert (corpus.folder / "tokens.bin").read_bytes() == tokens


def _prepare(config: DataConfig) -> Path | None:
    return prepare_corpus(config, 300)


def test_two_processes_at_once(configure: Configure, texts: Texts) -> None:
    config = configure(source="files", path=texts(*DOCUMENTS * 20))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(_prepare, [config] * 2, chunksize=1)
    assert folders[0] == folders[1] is not None
    train, held_out = texts_of(load_corpus(config, 300, 0, folders[0]))
    assert train + held_out == Counter(DOCUMENTS * 20)
    assert config.cache_dir is not None
    assert not list(Path(config.cache_dir).glob(".*"))


def test_counts_are_told(configure: Configure, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rows = [json.dumps({"text": text}) for text in [*DOCUMENTS, ""]] + ["oops"] * 3
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    config = configure(
        source="files", path=str(tmp_path / "a.jsonl"), tokenizer="bytes", bad_rows="skip", max_bad_rows=3
    )
    for _ in range(2):  # also when the tokens come from the cache
        caplog.clear()
        folder = prepare(config, 300)
        assert "a.jsonl: 40 documents" in caplog.text
        assert "2 documents held out; passed over: 1 without text, 3 malformed" in caplog.text
    meta = read_meta(folder)
    assert meta is not None
    assert (meta["documents"], meta["empty"], meta["skipped"]) == (40, 1, 3)
    assert meta["bytes"] == sum(map(len, DOCUMENTS)) == meta["tokens"] - 40
    config.max_bad_rows = 2
    with pytest.raises(DataError, match=r"a.jsonl:44: malformed JSON"):
        prepare(config, 300)


def test_the_bpe_learns_from_the_training_documents(
    configure: Configure, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noted(sample: list[str], vocab_size: int) -> Tokenizer:
        seen.extend(sample)
        return train_bpe(sample, vocab_size)

    monkeypatch.setattr(cache, "train_bpe", noted)
    config = configure(source="files", path=texts(*DOCUMENTS))
    corpus = open_corpus(config, 300, seed=0)
    assert Counter(seen) == texts_of(corpus)[0]
    assert config.cache_dir is not None
    shutil.rmtree(config.cache_dir)
    seen.clear()
    monkeypatch.setattr(cache, "BPE_CHARS", 100)
    open_corpus(config, 300, seed=0)
    assert 50 < sum(map(len, seen)) <= 100


def test_the_standard_library_is_the_default(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [file for file in cache.stdlib_files() if file.parent.name in ("json", "pydoc_data")]
    monkeypatch.setattr(cache, "stdlib_files", lambda: files)
    corpus = open_corpus(configure(), 1000, seed=0)
    assert corpus.vocab_size == 1000
    mean = corpus.bytes_per_token(corpus.held_out)
    assert mean is not None
    assert mean > 1.5
