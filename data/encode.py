"""Documents to tokens, a bounded amount at a time."""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from data.pieces import pieces_of
from data.tokenizer import Tokenizer

BATCH_CHARS = 1 << 22  # characters encoded together: enough to keep every thread busy, about 0.3 GB
BATCH_PIECES = 4096


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer
) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]:
    """Batches of (tokens, ends): each document's tokens and its end token; where in the batch documents end.

    ends[i] is the position after the i-th end token. A long document may span batches.
    """
    pieces: list[str] = []
    last: list[bool] = []  # is the piece its document's last one
    chars = 0
    for text in texts:
        for piece in pieces_of(text):
            pieces.append(piece)
            last.append(False)
            chars += len(piece)
            if chars >= BATCH_CHARS or len(pieces) >= BATCH_PIECES:
                yield from _encoded(pieces[:-1], last[:-1], tokenizer)
                pieces, last, chars = pieces[-1:], last[-1:], len(piece)
        last[-1] = True
    yield from _encoded(pieces, last, tokenizer)


def _encoded(
    pieces: list[str], last: list[bool], tokenizer: Tokenizer
) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]]:
    if not pieces:
        return
    end = np.array([tokenizer.end], np.uint32)
    parts = []
    for ids, ends_document in zip(tokenizer.encode_batch(pieces), last):
        parts += [ids, end[:ends_document]]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)[1::2]
    yield np.concatenate(parts), ends[np.array(last)]
