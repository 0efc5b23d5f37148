"""A dataset that is read while training: `data=hf data.streaming=true`. Nothing but its first documents is cached.

The stream is the same for every rank, for the layout must not change the data: each rank iterates and tokenizes all
of it and keeps its own part. So the dataset is read once per rank, and a resumed run reads again what the first one
consumed. Where that costs too much, data.streaming=false tokenizes once and caches the tokens.
"""

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.cache import digest, open_tokenizer, token_type
from data.config import DataConfig
from data.documents import Reading
from data.encode import encode_documents
from data.errors import DataError
from data.folder import cache_root, finished_folder
from data.held_out import content_hash
from data.hub import hub_documents, load_hub
from data.stream import STRETCH
from data.tokenizer import Tokenizer, train_bpe, use_threads

log = logging.getLogger(__name__)

FIRST_CHARS = 16_000_000  # of the unshuffled stream: what a BPE learns from and where the held-out documents are found
HELD_OUT_TOKENS = 1 << 18
SHUFFLE = 1000  # documents
AHEAD = 8  # batches


def prepare_stream(config: DataConfig, vocab_size: int) -> Path:
    """The folder with the tokenizer and the held-out tokens, from the first documents. Raises DataError."""
    use_threads(config.workers)
    tokenizer, fingerprint = open_tokenizer(config.tokenizer, vocab_size)
    dataset, name = _load(config)
    reading = Reading(config.skippable_rows)
    texts, hashes, limit = _first_documents(dataset, reading, name, config)
    key = digest(["stream", hashes, fingerprint, limit])

    def write(folder: Path) -> dict[str, Any]:
        used = tokenizer or train_bpe([text for text, hashed in zip(texts, hashes) if hashed >= limit], vocab_size)
        used.save(folder)
        held = [text for text, hashed in zip(texts, hashes) if hashed < limit]
        tokens = np.concatenate([batch for batch, _ in encode_documents(held, used)])
        tokens[:HELD_OUT_TOKENS].astype(token_type(used.vocab_size)).tofile(folder / "held_out.bin")
        return {
            "source": name,
            "tokenizer": config.tokenizer,
            "vocab_size": used.vocab_size,
            "dtype": np.dtype(token_type(used.vocab_size)).name,
            "max_id": used.vocab_size - 1,
            "limit": limit,
            "held_out_tokens": min(len(tokens), HELD_OUT_TOKENS),
        }

    folder = finished_folder(cache_root(config.cache_dir), key, write)
    log.info("%s: streamed; tokenizer and held-out documents come from its first %d; %s", name, len(texts), folder)
    return folder


class ForwardStream:
    """A stream that is read forwards: no further back than 2 `stretch` tokens from the furthest one read."""

    def __init__(self, batches: Callable[[], Iterator[npt.NDArray[np.integer]]], stretch: int = STRETCH) -> None:
        self.stretch = stretch
        self._batches = batches
        self._queue: queue.Queue[npt.NDArray[np.integer] | BaseException] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._pieces: list[npt.NDArray[np.integer]] = []
        self._begin, self._end = 0, 0  # what of the stream the pieces hold
        self._furthest = 0  # the end of the furthest read

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length), (length,). Raises what the reading thread met, DataError for one."""
        if start < self._begin:
            raise ValueError(f"a streamed dataset is read forwards only: {start} is before {self._begin}")
        self._furthest = max(self._furthest, start + length)
        oldest = min(start, self._furthest - 2 * self.stretch)
        while self._end < start + length:
            self._pieces.append(self._next())
            self._end += len(self._pieces[-1])
            while self._pieces and self._begin + len(self._pieces[0]) <= oldest:
                self._begin += len(self._pieces.pop(0))
        parts, begin = [], self._begin
        for piece in self._pieces:
            parts.append(piece[max(0, start - begin) : max(0, start + length - begin)])
            begin += len(piece)
        return np.concatenate(parts).astype(np.int64)

    def close(self) -> None:
        """Ends the reading thread."""
        self._stop.set()

    def _next(self) -> npt.NDArray[np.integer]:
        if self._thread is None:  # only now: a thread does not outlive the fork of a rank
            self._thread = threading.Thread(
                target=_produce, args=(self._batches, self._queue, self._stop), name="data", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._stop.set)
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._queue.put(item)  # the next read meets it too
            raise item
        return item


def stream_batches(
    config: DataConfig, tokenizer: Tokenizer, limit: int, seed: int
) -> Iterator[npt.NDArray[np.integer]]:
    """The tokens of the documents with a hash from `limit` on, epoch after epoch, shuffled by (seed, epoch)."""
    dataset, name = _load(config)
    shuffled = dataset.shuffle(seed=seed, buffer_size=SHUFFLE)
    for epoch in count():
        shuffled.set_epoch(epoch)
        reading = Reading(config.skippable_rows)
        documents = hub_documents(shuffled, reading, name, config.text_key)
        texts = (document.text for document in documents if content_hash(document.text) >= limit)
        found = False
        for tokens, _ in encode_documents(texts, tokenizer):
            found = True
            yield tokens
        if not found:
            raise DataError(f"{name}: no document to train on")
        log.info(
            "%s: epoch %d ends; passed over: %d without text, %d malformed", name, epoch, reading.empty, reading.skipped
        )


def _load(config: DataConfig) -> tuple[Any, str]:
    assert config.name is not None
    return load_hub(config.name, config.subset, config.split, config.text_key, streaming=True, cache=None)


def _first_documents(dataset: Any, reading: Reading, name: str, config: DataConfig) -> tuple[list[str], list[int], int]:
    """The first texts, their hashes, and the hash below which a document of this dataset is held out."""
    limit = int(config.held_out * 2**64)
    texts, hashes, chars = [], [], 0
    for document in hub_documents(dataset, reading, name, config.text_key):
        texts.append(document.text)
        hashes.append(content_hash(document.text))
        chars += len(document.text)
        if chars >= FIRST_CHARS and min(hashes) < limit <= max(hashes):
            return texts, hashes, limit
    # That was all of it. A small dataset may lie on one side of the limit: at least one document goes to each.
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise DataError(f"{name}: {len(distinct)} documents are too few to stream; valid: data.streaming=false")
    return texts, hashes, min(max(limit, distinct[0] + 1), distinct[-1])


def _produce(
    batches: Callable[[], Iterator[npt.NDArray[np.integer]]],
    items: "queue.Queue[npt.NDArray[np.integer] | BaseException]",
    stop: threading.Event,
) -> None:
    """The thread: puts batches into `items`, at the end the error that ended it, until `stop`."""
    try:
        for batch in batches():
            if not _put(batch, items, stop):
                return
    except BaseException as error:
        _put(error, items, stop)


def _put(
    item: npt.NDArray[np.integer] | BaseException,
    items: "queue.Queue[npt.NDArray[np.integer] | BaseException]",
    stop: threading.Event,
) -> bool:
    while not stop.is_set():
        try:
            items.put(item, timeout=0.2)
        except queue.Full:
            continue
        return True
    return False
