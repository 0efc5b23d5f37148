"""The endless stream of training tokens. Every rank sees the same one and cuts its own part out of it."""

from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

STRETCH = 1 << 20  # tokens within which windows are shuffled: a few hundred documents


class TokenStream(Protocol):
    stretch: int  # tokens within which windows may be read in any order

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) of the stream, (length,)."""


class Stream:
    """Epoch after epoch of the same documents, each epoch in an order of its own.

    tokens: every document with its end token, one after another, (N,). offsets: where document d starts, and N at
    the end, (D + 1,). documents: the ones to train on, (n,). Epoch e goes through them in the order
    `np.random.default_rng([seed, e]).permutation(n)`, whole. So `read` is a pure function of (seed, start, length):
    it needs no state to resume and no care with threads.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.int64],
        documents: npt.NDArray[np.int64],
        seed: int,
    ) -> None:
        self.tokens = tokens
        self.starts = offsets[documents]
        self.lengths = offsets[documents + 1] - self.starts
        self.seed = seed
        self.tokens_per_epoch = int(self.lengths.sum())
        self.stretch = min(STRETCH, self.tokens_per_epoch)
        self._epochs: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        out = np.empty(length, np.int64)
        filled = 0
        while filled < length:
            epoch, begin = divmod(start + filled, self.tokens_per_epoch)
            end = min(begin + length - filled, self.tokens_per_epoch)
            out[filled : filled + end - begin] = self._read_epoch(epoch, begin, end)
            filled += end - begin
        return out

    def _read_epoch(self, epoch: int, begin: int, end: int) -> npt.NDArray[np.integer]:
        """Tokens [begin, end) of one epoch."""
        order, bounds = self._epoch(epoch)
        first = int(np.searchsorted(bounds, begin, side="right")) - 1
        last = int(np.searchsorted(bounds, end, side="left"))
        # Of each document touched: how many of its tokens are wanted, and how far it lies from its place in the epoch.
        inside = np.clip(bounds[first : last + 1], begin, end)
        counts = inside[1:] - inside[:-1]
        shifts = self.starts[order[first:last]] - bounds[first:last]
        return self.tokens[np.arange(begin, end) + np.repeat(shifts, counts)]

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The order of the documents, (n,), and where in the epoch each starts, with its end, (n + 1,)."""
        known = self._epochs.get(epoch)
        if known is None:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.starts))
            bounds = np.concatenate([[0], np.cumsum(self.lengths[order])])
            known = (order, bounds)
            # Two are kept, for steps that cross a border. The dict is replaced, never changed: threads may read it.
            self._epochs = dict([*list(self._epochs.items())[-1:], (epoch, known)])
        return known


def rank_batch(
    stream: TokenStream,
    seed: int,
    tokens_consumed: int,
    num_sequences: int,
    seq_len: int,
    part: int = 0,
    num_parts: int = 1,
    *,
    begin: int = 0,
    place: int = 0,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Part `part` of `num_parts` of a step's sequences: (inputs, targets), each (num_sequences / num_parts, seq_len).

    A sequence is a window of the stream; its targets lie one token further. Every part takes its contiguous share of
    the step's sequences, so the parts in order are the whole whatever their number. Sequences are of this length since
    `begin` tokens were consumed, and have been read from `place` in the stream on.
    """
    share, rest = divmod(num_sequences, num_parts)
    assert rest == 0, f"{num_sequences} sequences do not divide into {num_parts} parts"
    first = (tokens_consumed - begin) // seq_len + part * share
    starts = [place + window_start(window, seq_len, stream.stretch, seed) for window in range(first, first + share)]
    windows = np.stack([stream.read(start, seq_len + 1) for start in starts])  # (share, seq_len + 1)
    return windows[:, :-1], windows[:, 1:]


def window_start(number: int, seq_len: int, stretch: int, seed: int) -> int:
    """Where in the stream the window begins that is trained on as number `number` of all.

    The stream is a row of windows of seq_len tokens, and those of each stretch come in an order shuffled by the seed,
    each once. Unshuffled, a small batch would hold one long document, and its sequences would be no independent
    samples: training is slower, and the noise of the gradient can't be told from them.
    """
    per_stretch = max(1, stretch // seq_len)
    index, place = divmod(number, per_stretch)
    return (index * per_stretch + int(_shuffled(seed, index, per_stretch)[place])) * seq_len


def next_place(place: int, tokens: int, seq_len: int, stretch: int) -> int:
    """Where to read on when the length of sequences changes, after so many tokens from `place` on: the next stretch.

    What is left of the last one, shuffled in windows of another length, can't be told from what was read.
    """
    whole = max(1, stretch // seq_len) * seq_len  # what windows take of a stretch
    return place + -(-tokens // whole) * whole


@lru_cache(maxsize=4)
def _shuffled(seed: int, index: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, index, count]).permutation(count)
