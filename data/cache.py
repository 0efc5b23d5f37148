"""Tokens, cached once as memory-mapped files. A second start finds them by content and tokenizer, and reads nothing.

A finished folder holds
    tokens.bin    every document followed by its end token; 16 bits a token if the tokenizer's ids fit, else 32
    offsets.npy   where each document starts, and the number of tokens at the end, int64
    train.npy     the documents to train on, int64
    held_out.bin  the tokens of the other ones, in the order of their hashes
    tokenizer.json, meta.json
"""

import hashlib
import heapq
import json
import logging
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from data.config import DataConfig
from data.documents import Document, Reading
from data.encode import encode_documents
from data.errors import DataError
from data.files import FileSource, find_files, stdlib_files
from data.folder import cache_root, finished_folder, read_meta
from data.held_out import choose_held_out, content_hash, divide
from data.hub import HubSource, load_hub
from data.tokenizer import (
    Tokenizer,
    check_bpe_size,
    check_vocabulary,
    load_tokenizer,
    train_bpe,
    use_threads,
)

log = logging.getLogger(__name__)

FORMAT = 1  # of the files above and of what is chosen for them: part of the key
BPE_CHARS = 32_000_000  # what a BPE learns from: about 5 s on two cores, and more text changes few merges


class Source(Protocol):
    name: str
    size: float  # what `Reading.done` reaches

    def content_key(self, cache: Path) -> list[str]:
        """Equal if and only if the documents are."""

    def documents(self, reading: Reading) -> Iterator[Document]: ...


def prepare(config: DataConfig, vocab_size: int) -> Path:
    """The folder with the tokens of `config`, written first if it isn't there. Raises DataError."""
    use_threads(config.workers)
    root = cache_root(config.cache_dir)
    source = _open_source(config, root)
    tokenizer, fingerprint = open_tokenizer(config.tokenizer, vocab_size)
    content = source.content_key(root)
    bad_rows = (config.bad_rows, config.skippable_rows)
    key = digest([FORMAT, content, config.text_key, bad_rows, fingerprint, config.held_out])
    folder = finished_folder(root, key, lambda partial: _write(partial, source, tokenizer, config, vocab_size))
    _report(folder)
    return folder


def open_tokenizer(spec: str, vocab_size: int) -> tuple[Tokenizer | None, str]:
    """The tokenizer, None if it has to be trained, and its fingerprint. Raises DataError if it needs a larger model."""
    if spec == "bpe":
        check_bpe_size(vocab_size)
        return None, f"bpe-{vocab_size}"
    tokenizer = load_tokenizer(spec)
    check_vocabulary(tokenizer.vocab_size, vocab_size, spec)
    return tokenizer, tokenizer.fingerprint


def digest(values: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def token_type(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def _open_source(config: DataConfig, root: Path) -> Source:
    if config.source == "stdlib":
        return FileSource(stdlib_files(), name="stdlib", text_key=config.text_key, lenient=True)
    if config.source == "files":
        assert config.path is not None
        return FileSource(find_files(config.path), name=config.path, text_key=config.text_key)
    assert config.name is not None
    cache = root / "datasets" if config.cache_dir is not None else None
    dataset, name = load_hub(config.name, config.subset, config.split, config.text_key, streaming=False, cache=cache)
    return HubSource(dataset, name=name, text_key=config.text_key)


def _write(
    folder: Path, source: Source, tokenizer: Tokenizer | None, config: DataConfig, vocab_size: int
) -> dict[str, Any]:
    if tokenizer is None:
        log.info("%s: training a BPE of %d entries", source.name, vocab_size)
        sample = _bpe_sample(source, Reading(config.skippable_rows), config.held_out)
        tokenizer = train_bpe(sample, vocab_size)
    tokenizer.save(folder)
    dtype = token_type(tokenizer.vocab_size)
    reading = Reading(config.skippable_rows)
    hashes, offsets = array("Q"), array("q", [0])
    num_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal num_bytes
        for document in source.documents(reading):
            hashes.append(content_hash(document.text))
            num_bytes += len(document.text.encode())
            yield document.text

    written, max_id = 0, 0
    with (folder / "tokens.bin").open("wb") as file, _progress(source) as advance:
        for tokens, ends in encode_documents(texts(), tokenizer):
            tokens.astype(dtype).tofile(file)
            offsets.extend((ends + written).tolist())
            written += len(tokens)
            max_id = max(max_id, int(tokens.max()))
            advance(reading.done)
    if written == 0:
        raise DataError(
            f"{source.name}: no text in it ({reading.empty} empty documents, {reading.skipped} skipped rows)"
        )
    held_out = divide(folder, np.array(hashes), np.array(offsets), dtype, tokenizer.end, config.held_out)
    return {
        "source": source.name,
        "tokenizer": config.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "dtype": np.dtype(dtype).name,
        "max_id": max_id,
        "documents": len(hashes),
        "bytes": num_bytes,
        "tokens": written,
        "empty": reading.empty,
        "skipped": reading.skipped,
        **held_out,
    }


def _bpe_sample(source: Source, reading: Reading, fraction: float) -> list[str]:
    """What a BPE learns from: the training documents, of a large corpus those with the largest hashes."""
    hashes = array("Q")
    sample: list[tuple[int, int, str]] = []  # a heap by hash
    chars = 0
    for index, document in enumerate(source.documents(reading)):
        hashes.append(content_hash(document.text))
        heapq.heappush(sample, (hashes[-1], index, document.text))
        chars += len(document.text)
        while chars > BPE_CHARS and len(sample) > 1:
            chars -= len(heapq.heappop(sample)[2])
    held = choose_held_out(np.array(hashes), fraction)
    if held is None:  # one document, of which the last part is held out
        return [text[: min(BPE_CHARS, int(len(text) * (1 - fraction)))] for _, _, text in sample[:1]]
    return [text[:BPE_CHARS] for _, index, text in sample if not held[index]]


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[float], None]]:
    """A bar on the terminal, if there is one; takes how much of `source.size` is done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(f"tokenizing {source.name}", total=source.size)
        yield lambda done: progress.update(task, completed=done)
        progress.update(task, completed=source.size)


def _report(folder: Path) -> None:
    meta = read_meta(folder)
    assert meta is not None
    log.info(
        "%s: %d documents, %.1f MB, %d tokens (%s, %d entries), %d documents held out; "
        "passed over: %d without text, %d malformed; %s",
        *(meta[key] for key in ("source", "documents")),
        meta["bytes"] / 1e6,
        *(meta[key] for key in ("tokens", "tokenizer", "vocab_size", "held_out_documents", "empty", "skipped")),
        folder,
    )
