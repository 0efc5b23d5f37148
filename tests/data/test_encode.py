"""A document gives the same tokens however it is cut into batches and pieces."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import encode, pieces
from data.encode import encode_documents
from data.tokenizer import ByteTokenizer, Tokenizer, train_bpe

TEXT = Path(encode.__file__).read_text()
BPE = train_bpe([TEXT], 400)


def documents(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    tokens: list[int] = []
    ends: list[int] = []
    for batch, batch_ends in encode_documents(texts, tokenizer):
        ends += (batch_ends + len(tokens)).tolist()
        tokens += batch.tolist()
    assert len(tokens) == (ends[-1] if ends else 0)
    return [tokens[start:end] for start, end in zip([0, *ends], ends)]


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE])
@given(texts=st.lists(st.text("ab .\n", max_size=40), max_size=9), limits=st.tuples(*[st.integers(1, 12)] * 3))
def test_batches_and_pieces_change_no_token(
    tokenizer: Tokenizer, texts: list[str], limits: tuple[int, int, int]
) -> None:
    whole = [[*tokenizer.encode_batch([text])[0].tolist(), tokenizer.end] for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "BATCH_CHARS", limits[0])
        patch.setattr(encode, "BATCH_PIECES", limits[1])
        patch.setattr(pieces, "PIECE_CHARS", limits[2])
        assert documents(texts, tokenizer) == whole


def test_a_long_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 100)
    cut = list(pieces.pieces_of(TEXT))
    assert len(cut) > 3
    assert "".join(cut) == TEXT
    assert documents([TEXT], BPE) == [[*BPE.encode_batch([TEXT])[0].tolist(), BPE.end]]
    assert train_bpe([TEXT], 400).fingerprint == BPE.fingerprint


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "BATCH_CHARS", 100)
    sizes = [len(batch) for batch, _ in encode_documents(["x" * 30] * 40, ByteTokenizer())]
    assert max(sizes) <= 130
    assert sum(sizes) == 40 * 31
    assert [len(ends) for _, ends in encode_documents(["a"] * 5000, ByteTokenizer())] == [99] * 50 + [50]
    monkeypatch.setattr(encode, "BATCH_CHARS", 10**6)
    monkeypatch.setattr(encode, "BATCH_PIECES", 1000)
    assert [len(ends) for _, ends in encode_documents(["a"] * 5000, ByteTokenizer())] == [999] * 5 + [5]
