"""Long texts in pieces: whole, a text of 50 MB takes a tokenizer 3 GB and one thread."""

import re
from collections.abc import Iterator

PIECE_CHARS = 1 << 18

# Between two lines of which neither is blank: byte-level tokenizers (GPT-2's, Llama 3's, ours) never join what lies on
# both sides, so a text cut there gives the tokens it gives whole.
_CUT = re.compile(r"(?<=\S\n)(?=\S)")


def pieces_of(text: str) -> Iterator[str]:
    """The text, cut between lines into pieces a little above PIECE_CHARS; whole where no line allows it."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        cut = _CUT.search(text, start + PIECE_CHARS)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]
