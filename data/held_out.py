"""Which documents are kept for evaluation, and how they are cut into windows."""

import hashlib
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.errors import DataError

IGNORED = -100  # a target that counts nowhere


def content_hash(text: str) -> int:
    """64 bits of the text itself: a document is on the same side whatever the seed, its place or its neighbours."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def choose_held_out(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_] | None:
    """Which documents are held out: the ceil(fraction * n) with the smallest hashes, at least one, never all.

    Equal documents are on one side. None if there are no two different documents to divide.
    """
    distinct = np.unique(hashes)
    if distinct.size < 2:
        return None
    wanted = min(max(ceil(fraction * hashes.size - 1e-9), 1), hashes.size - 1)
    limit = min(np.partition(hashes, wanted - 1)[wanted - 1], distinct[-2])
    return hashes <= limit


def divide(
    folder: Path,
    hashes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.int64],
    dtype: type[np.uint16] | type[np.uint32],
    end: int,
    fraction: float,
) -> dict[str, int]:
    """Writes train.npy, offsets.npy and held_out.bin beside tokens.bin, and says how much is held out.

    hashes: of each document, (D,). offsets: see `data/cache.py`, (D + 1,).
    """
    tokens = np.memmap(folder / "tokens.bin", dtype, "r")
    held = choose_held_out(hashes, fraction)
    if held is None:  # one document: its last tokens are held out, and what is left gets an end token of its own
        cut = len(tokens) - max(2, ceil(fraction * len(tokens)))
        if cut < 1:
            raise DataError(f"{len(tokens)} tokens are too few for a part to train on and one to hold out")
        tokens[cut:].tofile(folder / "held_out.bin")
        kept_back = len(tokens) - cut
        with (folder / "tokens.bin").open("r+b") as file:
            file.truncate(cut * tokens.itemsize)
            file.seek(0, 2)
            np.array([end], dtype).tofile(file)
        np.save(folder / "offsets.npy", np.array([0, cut + 1]))
        np.save(folder / "train.npy", np.array([0]))
        return {"held_out_documents": 1, "held_out_tokens": kept_back}
    held_documents = np.flatnonzero(held)
    with (folder / "held_out.bin").open("wb") as file:
        for document in held_documents[np.argsort(hashes[held_documents], kind="stable")]:
            tokens[offsets[document] : offsets[document + 1]].tofile(file)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "train.npy", np.flatnonzero(~held))
    return {
        "held_out_documents": len(held_documents),
        "held_out_tokens": int((offsets[held_documents + 1] - offsets[held_documents]).sum()),
    }


def held_out_windows(
    held_out: npt.NDArray[np.integer], seq_len: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(inputs, targets), each (N, seq_len), that score every token but the first, once each.

    Windows follow one another; the last one is filled up with target -100. No window if there is nothing to score.
    """
    num_predictions = max(len(held_out) - 1, 0)
    num_windows = ceil(num_predictions / seq_len)
    inputs = np.zeros(num_windows * seq_len, np.int64)
    targets = np.full(num_windows * seq_len, IGNORED, np.int64)
    inputs[:num_predictions] = held_out[:num_predictions]
    targets[:num_predictions] = held_out[1 : num_predictions + 1]
    return inputs.reshape(num_windows, seq_len), targets.reshape(num_windows, seq_len)
