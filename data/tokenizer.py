"""Text to tokens and back: bytes, a BPE trained on the corpus, or any tokenizer.json.

Text is always encoded as text: no tokenizer here adds its own first or last token, truncates or pads, and a document
that spells out "<|endoftext|>" gets ordinary tokens for it. Only `end`, which the writer of the stream puts after
each document, ends a document.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from data.errors import DataError
from data.pieces import pieces_of

if TYPE_CHECKING:
    import tokenizers

END = "<|endoftext|>"
END_NAMES = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
SMALLEST_BPE = 257  # every byte, and the end token
FILE = "tokenizer.json"


class Tokenizer(Protocol):
    vocab_size: int  # the largest id + 1
    end: int  # the id after each document
    fingerprint: str  # equal if and only if the same text gives the same tokens

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[np.uint32]]:
        """The tokens of each text, without end tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Leaves in `folder` what `saved_tokenizer` needs."""


class ByteTokenizer:
    """One token per byte of UTF-8."""

    vocab_size = 257
    end = 256
    fingerprint = "bytes"

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[np.uint32]]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        parts = (END.encode() if token == self.end else bytes([token]) for token in ids)
        return b"".join(parts).decode(errors="replace")

    def save(self, folder: Path) -> None:
        pass


class JsonTokenizer:
    """Whatever a tokenizer.json describes. `name` is for messages. Raises DataError if it has no end token."""

    def __init__(self, model: "tokenizers.Tokenizer", name: str) -> None:
        vocabulary = model.get_vocab(with_added_tokens=True)
        end = next((token for token in END_NAMES if token in vocabulary), None)
        if end is None:
            raise DataError(f"data.tokenizer={name} has no end token; valid: one that has any of {' '.join(END_NAMES)}")
        model.no_truncation()
        model.no_padding()
        if getattr(model.model, "dropout", None):
            model.model.dropout = None  # random merges: the same text would give other tokens each time
        self.fingerprint = hashlib.blake2b(model.to_str().encode(), digest_size=16).hexdigest()
        model.encode_special_tokens = True  # special tokens met in a text are text
        self.model = model
        self.name = name
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = vocabulary[end]
        # Where it is not marked as special, or a word of the model itself (T5's is), the text is cut inside it instead.
        self._inside_end = re.compile(f"(?<={re.escape(end[0])})(?={re.escape(end[1:])})", re.IGNORECASE)

    def encode_batch(self, texts: list[str]) -> list[npt.NDArray[np.uint32]]:
        encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        batch = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        for index, ids in enumerate(batch):
            if (ids == self.end).any():
                batch[index] = self._encode_without_end(texts[index])
        return batch

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        self.model.save(str(folder / FILE), pretty=False)

    def _encode_without_end(self, text: str) -> npt.NDArray[np.uint32]:
        encodings = self.model.encode_batch_fast(self._inside_end.split(text), add_special_tokens=False)
        ids = np.concatenate([np.array(encoding.ids, np.uint32) for encoding in encodings])
        if (ids == self.end).any():
            raise DataError(
                f"data.tokenizer={self.name} uses its end token inside a text, where it can't be told apart"
            )
        return ids


def load_tokenizer(spec: str) -> Tokenizer:
    """`bytes`, a tokenizer.json or a name on the hub (`bpe` needs a text to learn from: see `train_bpe`)."""
    if spec == "bytes":
        return ByteTokenizer()
    from tokenizers import Tokenizer as Model

    path = Path(spec).expanduser()
    try:
        if path.is_file():
            return JsonTokenizer(Model.from_file(str(path)), spec)
        # What looks like a path is not asked for on the hub, which retries for half a minute when it is out of reach.
        if not path.exists() and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(?<!\.json)", spec):
            return JsonTokenizer(Model.from_pretrained(spec), spec)
    except DataError:
        raise
    except Exception as error:  # `tokenizers` raises bare Exception for a broken file, the hub a dozen kinds
        if path.is_file():
            raise DataError(f"data.tokenizer={spec} is not a tokenizer.json: {error}") from error
        reason = str(error).strip().split("\n")[0]
        hint = get_close_matches(spec, ("bytes", "bpe"), n=1)
        raise DataError(
            f"data.tokenizer={spec} is neither bytes, bpe, a file, nor a tokenizer.json that can be reached on the hub"
            + (f"; did you mean {hint[0]}?" if hint else f" ({reason})")
        ) from error
    raise DataError(f"data.tokenizer={spec}: no such file; valid: bytes, bpe, a tokenizer.json, a hub name")


def saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `save` left in `folder`."""
    return load_tokenizer(str(folder / FILE) if (folder / FILE).exists() else "bytes")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` entries, the end token among them; fewer when the text is short.

    Depends on the texts alone, neither on their order nor on the number of threads.
    """
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    check_bpe_size(vocab_size)
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator((piece for text in texts for piece in pieces_of(text)), trainer)
    return JsonTokenizer(model, "bpe")


def check_bpe_size(vocab_size: int) -> None:
    if vocab_size < SMALLEST_BPE:
        raise DataError(
            f"model.vocab_size={vocab_size} is too small for data.tokenizer=bpe; "
            f"valid: model.vocab_size >= {SMALLEST_BPE}"
        )


def check_vocabulary(entries: int, vocab_size: int, spec: str) -> None:
    """Raises DataError if the model's embedding has fewer rows than the tokenizer has entries."""
    if entries > vocab_size:
        raise DataError(
            f"model.vocab_size={vocab_size} is smaller than the tokenizer's {entries} entries (data.tokenizer={spec}); "
            f"valid: model.vocab_size >= {entries}"
        )


def use_threads(workers: int | None) -> None:
    """How many threads `tokenizers` uses. Works once per process, before the first text is encoded."""
    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)
