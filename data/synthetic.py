"""Tokens from a rule with a known entropy: to see a loss fall to where it must, without any text."""

from math import ceil

import numpy as np
import numpy.typing as npt

from data.errors import DataError

DOCUMENT = 512  # tokens, its end token among them
NOISE = 4


def synthetic_documents(num_tokens: int, vocab_size: int, seed: int) -> npt.NDArray[np.int32]:
    """Documents of 512 tokens, (D, 512), D * 512 >= num_tokens; each ends with the end token, vocab_size - 1.

    next = (5 * previous + 7 + noise) mod (vocab_size - 1), noise uniform over 0..3, the first token uniform. So no
    model gets below ln 4 = 1.386 nats on such a token. Over a whole document that knows its length it is
    (510 ln 4 + ln(vocab_size - 1)) / 512 nats per token: 1.396 at vocab_size 2048.
    """
    if vocab_size <= NOISE:
        raise DataError(f"model.vocab_size={vocab_size} is too small for data=synthetic; valid: {NOISE + 1} or more")
    rng = np.random.default_rng([seed, DOCUMENT])
    num_documents = ceil(num_tokens / DOCUMENT)
    values = vocab_size - 1
    noise = rng.integers(NOISE, size=(DOCUMENT, num_documents), dtype=np.uint8)
    tokens = np.empty((DOCUMENT, num_documents), np.int32)  # one step of all documents is one row
    tokens[0] = rng.integers(values, size=num_documents)
    for step in range(1, DOCUMENT - 1):
        tokens[step] = (5 * tokens[step - 1].astype(np.int64) + 7 + noise[step]) % values
    tokens[-1] = values
    return np.ascontiguousarray(tokens.T)
