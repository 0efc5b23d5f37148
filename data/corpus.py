"""What training sees of the data: `open_corpus`, or its two halves where several ranks share a machine."""

import logging
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data.config import DataConfig
from data.errors import DataError
from data.folder import read_meta
from data.stream import Stream, TokenStream
from data.synthetic import DOCUMENT, synthetic_documents
from data.tokenizer import Tokenizer, check_vocabulary, saved_tokenizer

log = logging.getLogger(__name__)


@dataclass
class Corpus:
    train: TokenStream
    held_out: npt.NDArray[np.integer]  # the held-out documents' tokens, each document with its end token, (N,)
    num_train_tokens: int | None  # in one epoch; None if it is streamed
    vocab_size: int  # entries the tokenizer needs in the model
    folder: Path | None  # with the tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """None if the tokens are made up. Read when first asked for: training does not need it."""
        return saved_tokenizer(self.folder) if self.folder else None

    def scored(self, num_tokens: int | None) -> npt.NDArray[np.integer]:
        """The first `num_tokens` held-out tokens (None: all), and the one before them that predicts the first."""
        return self.held_out if num_tokens is None else self.held_out[: num_tokens + 1]

    def bytes_per_token(self, tokens: npt.NDArray[np.integer]) -> float | None:
        """Bytes of text for which each of these tokens stands on average, an end token for none; None: no text."""
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(tokens[tokens != self.tokenizer.end].tolist())
        return len(text.encode()) / len(tokens) or None


def open_corpus(config: DataConfig, vocab_size: int, seed: int) -> Corpus:
    """The corpus, tokenized and cached first where it has to be. Raises DataError."""
    return load_corpus(config, vocab_size, seed, prepare_corpus(config, vocab_size))


def prepare_corpus(config: DataConfig, vocab_size: int) -> Path | None:
    """The expensive half: the folder that `load_corpus` reads. Once per node, in a process that forks no ranks later.

    Several at once are safe: one writes, the others wait. Raises DataError.
    """
    if config.source == "synthetic":
        return None
    if config.streaming:
        from data.streaming import prepare_stream

        return prepare_stream(config, vocab_size)
    from data.cache import prepare

    return prepare(config, vocab_size)


def load_corpus(config: DataConfig, vocab_size: int, seed: int, folder: Path | None) -> Corpus:
    """The cheap half, for every rank: maps the files that `prepare_corpus` left. Raises DataError."""
    if folder is None:
        return _synthetic(config, vocab_size, seed)
    meta = read_meta(folder)
    if meta is None:
        raise DataError(f"{folder} is damaged or gone; start again")
    check_vocabulary(max(meta["vocab_size"], meta["max_id"] + 1), vocab_size, meta["tokenizer"])
    held_out = np.memmap(folder / "held_out.bin", meta["dtype"], "r")
    if config.streaming:
        return Corpus(_forward(config, seed, folder, meta), held_out, None, meta["vocab_size"], folder)
    tokens = np.memmap(folder / "tokens.bin", meta["dtype"], "r")
    train = Stream(tokens, np.load(folder / "offsets.npy"), np.load(folder / "train.npy"), seed)
    return Corpus(train, held_out, train.tokens_per_epoch, meta["vocab_size"], folder)


def _forward(config: DataConfig, seed: int, folder: Path, meta: dict[str, Any]) -> TokenStream:
    from data.streaming import ForwardStream, stream_batches

    return ForwardStream(lambda: stream_batches(config, saved_tokenizer(folder), meta["limit"], seed))


def _synthetic(config: DataConfig, vocab_size: int, seed: int) -> Corpus:
    documents = synthetic_documents(config.tokens, vocab_size, seed)
    num_held_out = min(max(ceil(config.held_out * len(documents)), 1), len(documents) - 1)
    num_train = len(documents) - num_held_out
    offsets = np.arange(num_train + 1) * DOCUMENT
    train = Stream(documents[:num_train].reshape(-1), offsets, np.arange(num_train), seed)
    return Corpus(train, documents[num_train:].reshape(-1), train.tokens_per_epoch, vocab_size, None)
