"""Text goes in and comes out; nothing in a text can end a document."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from data.errors import DataError
from data.tokenizer import (
    END,
    ByteTokenizer,
    JsonTokenizer,
    check_vocabulary,
    load_tokenizer,
    saved_tokenizer,
    train_bpe,
)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "data" / "tokenizer.py").read_text()
BPE = train_bpe([TEXT], 400)


def unicode_text() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(unicode_text(), max_size=4))
def test_bytes_and_bpe_give_the_text_back(texts: list[str]) -> None:
    for tokenizer in (ByteTokenizer(), BPE):
        batch = tokenizer.encode_batch(texts)
        assert [tokenizer.decode(ids.tolist()) for ids in batch] == texts
        assert all((ids != tokenizer.end).all() and (ids < tokenizer.vocab_size).all() for ids in batch)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE])
def test_the_end_token_spelled_out_in_a_text_is_text(tokenizer: ByteTokenizer | JsonTokenizer) -> None:
    text = f"a {END}{END} b <|endof"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end not in ids
    assert tokenizer.decode([*ids.tolist(), tokenizer.end]) == text + END


def test_bpe_learns_and_is_the_same_from_the_same_text() -> None:
    assert (BPE.vocab_size, BPE.end) == (400, 0)
    (ids,) = BPE.encode_batch([TEXT])
    assert len(ids) < 0.6 * len(TEXT)
    assert train_bpe([TEXT], 400).fingerprint == BPE.fingerprint
    lines = TEXT.splitlines(keepends=True)
    shuffled = random.Random(0).sample(lines, len(lines))
    assert train_bpe(shuffled, 400).fingerprint == train_bpe(lines, 400).fingerprint


def test_the_number_of_threads_changes_no_token() -> None:
    code = (
        "import hashlib, pathlib; from data.tokenizer import train_bpe\n"
        "texts = [file.read_text() for file in sorted(pathlib.Path('data').glob('*.py'))] * 8\n"
        "bpe = train_bpe(texts, 600)\n"
        "print(bpe.fingerprint, hashlib.md5(b''.join(ids.tobytes() for ids in bpe.encode_batch(texts))).hexdigest())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "RAYON_NUM_THREADS": workers},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for workers in ("1", "3")
    }
    assert len(outputs) == 1


def test_a_vocabulary_too_small() -> None:
    assert train_bpe([TEXT], 257).vocab_size == 257
    assert train_bpe(["ab"], 9999).vocab_size == 258  # a short text teaches no more
    with pytest.raises(DataError, match=r"model.vocab_size=256 is too small .*valid: model.vocab_size >= 257"):
        train_bpe([TEXT], 256)
    message = (
        r"model.vocab_size=2048 is smaller than the tokenizer's 50257 entries \(data.tokenizer=gpt2\); "
        r"valid: model.vocab_size >= 50257"
    )
    with pytest.raises(DataError, match=message):
        check_vocabulary(50257, 2048, "gpt2")
    check_vocabulary(2048, 2048, "bpe")


def test_saved_and_read_again(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    again = saved_tokenizer(tmp_path)
    assert again.fingerprint == BPE.fingerprint
    assert (again.encode_batch([TEXT])[0] == BPE.encode_batch([TEXT])[0]).all()
    assert saved_tokenizer(tmp_path / "none").fingerprint == "bytes"


def test_what_a_file_adds_or_cuts_is_left_out(tmp_path: Path) -> None:
    model = Tokenizer.from_str(BPE_JSON)
    model.add_special_tokens(["<s>"])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 400)])
    model.enable_truncation(4)
    model.enable_padding(length=9000, pad_id=0)
    model.model.dropout = 0.5
    model.save(str(tmp_path / "own.json"))
    tokenizer = load_tokenizer(str(tmp_path / "own.json"))
    assert tokenizer.vocab_size == 401
    assert (tokenizer.encode_batch([TEXT, "x"])[0] == BPE.encode_batch([TEXT])[0]).all()
    (ids,) = tokenizer.encode_batch(["a <s> b"])
    assert 400 not in ids  # nor does a text hold any other special token
    assert tokenizer.decode(ids.tolist()) == "a <s> b"


def json_of(tokenizer: object) -> str:
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer.model.to_str()


BPE_JSON = json_of(BPE)


def unigram() -> Tokenizer:  # its vocabulary holds the end token as a word, as T5's does
    pieces = [("<unk>", 0.0), ("</s>", 0.0)] + [(letter, -5.0) for letter in "\u2581ab</s>"]
    model = Tokenizer(models.Unigram(pieces, 0))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    return model


def words() -> Tokenizer:
    model = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "</s>": 3}, "<unk>"))
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return model


def added() -> Tokenizer:  # an end token that is not marked as special
    model = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, "<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_tokens([AddedToken("</s>", special=False)])
    return model


@pytest.mark.parametrize("make", [unigram, words, added])
@pytest.mark.parametrize("text", ["a </s> b", "</s>", "a </S> </s>"])
def test_no_model_makes_an_end_token_out_of_a_text(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = JsonTokenizer(make(), "own")
    assert tokenizer.decode([tokenizer.end]) == "</s>"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.end not in ids
    assert len(ids)


def test_an_end_token_that_is_also_the_unknown_token() -> None:
    model = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, "</s>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(DataError, match=r"data.tokenizer=own uses its end token inside a text"):
        JsonTokenizer(model, "own").encode_batch(["a b"])


def test_ids_with_gaps_count_up_to_the_largest(tmp_path: Path) -> None:
    model = Tokenizer(models.WordLevel({"a": 0, "</s>": 70000}, "a"))
    assert JsonTokenizer(model, "own").vocab_size == 70001


@pytest.mark.parametrize(
    ("spec", "content", "problem"),
    [
        ("none.json", None, r"data.tokenizer=.*none.json: no such file; valid: bytes, bpe"),
        ("bad.json", "{", r"data.tokenizer=.*bad.json is not a tokenizer.json: "),
        (
            "end.json",
            Tokenizer(models.WordLevel({"a": 0}, "a")).to_str(),
            r"data.tokenizer=.*end.json has no end token; valid: one that has any of <\|endoftext\|> ",
        ),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, spec: str, content: str | None, problem: str) -> None:
    if content is not None:
        (tmp_path / spec).write_text(content)
    with pytest.raises(DataError, match=problem):
        load_tokenizer(str(tmp_path / spec))


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        @staticmethod
        def from_pretrained(name: str) -> Tokenizer:
            if name == "someone/bpe":
                return Tokenizer.from_str(BPE_JSON)
            raise OSError("no connection\nand more")

    monkeypatch.setattr("tokenizers.Tokenizer", Hub)
    assert load_tokenizer("someone/bpe").fingerprint == BPE.fingerprint
    with pytest.raises(DataError, match=r"data.tokenizer=no/such is neither .* reached on the hub \(no connection\)$"):
        load_tokenizer("no/such")
    with pytest.raises(DataError, match=r"did you mean bytes\?"):
        load_tokenizer("byte")
