"""Every kind of bad file or row is named with its line; every good one gives its text unchanged."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.documents import READERS, Document, Reading
from data.errors import DataError


def read(path: Path, reading: Reading | None = None) -> list[Document]:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    return list(READERS[suffix](path, reading or Reading(skippable=0), "text"))


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def parquet(path: Path, column: pa.Array, name: str = "text") -> Path:
    pq.write_table(pa.table({name: column}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz", "a.md.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, "\ufeffone\r\ntwo \u00e9\n\n".encode())
    assert read(path) == [("one\r\ntwo \u00e9\n\n", str(path))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_jsonl_line_is_one_document(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, b'{"text": "a\\nb", "id": 1}\n{"id": 2, "text": "\xc3\xa9"}')
    assert read(path) == [("a\nb", f"{path}:1"), ("\u00e9", f"{path}:2")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_parquet_row_is_one_document(tmp_path: Path, kind: pa.DataType) -> None:
    path = parquet(tmp_path / "a.parquet", pa.array(["a", "b\n", "\u00e9"]).cast(kind))
    expected = [("a", f"{path}: row 1"), ("b\n", f"{path}: row 2"), ("\u00e9", f"{path}: row 3")]
    assert read(path) == expected
    zipped = written(tmp_path, "b.parquet.gz", path.read_bytes())
    assert [text for text, _ in read(zipped)] == ["a", "b\n", "\u00e9"]


BAD_LINES = [
    (b'{"text": "x"', "malformed JSON"),
    (b"[" * 100_000, "malformed JSON"),
    (b"1" * 5000, "malformed JSON"),
    (b'["x"]', "the row is list, not an object"),
    (b'{"txt": "x"}', r"the row has no 'text' \(data.text_key\), only txt"),
    (b'{"text": null}', "'text' is null"),
    (b'{"text": 3}', "'text' is int, not text"),
    (b'{"text": "\\ud800"}', "'text' holds a lone surrogate"),
    (b'{"text": "\xff"}', r"not UTF-8 text \(byte 0xff at column 11\)"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, name: str, line: bytes, problem: str) -> None:
    path = written(tmp_path, name, b'{"text": "x"}\n' + line + b'\n{"text": "y"}\n')
    with pytest.raises(DataError, match=f"^{path}:2: {problem}"):
        read(path)
    reading = Reading(skippable=1)
    assert [text for text, _ in read(path, reading)] == ["x", "y"]
    assert reading.skipped == 1


def test_bad_parquet_rows_are_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "null.parquet", pa.array(["x", "y", None, "z"]))
    with pytest.raises(DataError, match=rf"{path}: row 3: 'text' is null"):
        read(path)
    assert [text for text, _ in read(path, Reading(skippable=1))] == ["x", "y", "z"]


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    data = pa.array([b"x", b"\xff", b"y"], pa.binary())
    path = parquet(tmp_path / "a.parquet", pa.Array.from_buffers(pa.string(), 3, data.buffers()))
    with pytest.raises(DataError, match=rf"{path}: row 2: 'text' is not UTF-8 text"):
        read(path)
    assert [text for text, _ in read(path, Reading(skippable=1))] == ["x", "y"]


@pytest.mark.parametrize(
    ("column", "name", "problem"),
    [
        (pa.array(["x"]), "body", r"no column 'text' \(data.text_key\), only body"),
        (pa.array([1]), "text", "column 'text' holds int64, not text"),
        (pa.array([], pa.string()), "text", r"the file is empty \(no rows\)"),
    ],
)
def test_a_parquet_file_without_texts(tmp_path: Path, column: pa.Array, name: str, problem: str) -> None:
    path = parquet(tmp_path / "a.parquet", column, name)
    with pytest.raises(DataError, match=f"^{path}: {problem}"):
        read(path, Reading(skippable=9))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(DataError, match=rf"^{path}:3: not UTF-8 text \(byte 0xe9\)"):
        read(path)


@pytest.mark.parametrize("suffix", ["txt", "md", "jsonl", "parquet", "txt.gz", "jsonl.gz", "parquet.gz"])
def test_a_missing_an_empty_and_a_broken_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    with pytest.raises(DataError, match=f"^{path}: no such file"):
        read(path)
    written(tmp_path, path.name, b"")
    with pytest.raises(DataError, match=f"^{path}: the file is empty"):
        read(path)
    path.unlink()
    path.mkdir()  # opening a folder fails, as opening a file without permission does
    with pytest.raises(DataError, match=f"^{path}(:1)?: cannot be read: "):
        read(path)


def test_broken_parquet(tmp_path: Path) -> None:
    path = written(tmp_path, "a.parquet", b"PAR1 no parquet PAR1")
    with pytest.raises(DataError, match=f"^{path}: cannot be read: "):
        read(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.parquet.gz"])
@pytest.mark.parametrize("broken", ["not gzip", "cut", "flipped"])
def test_broken_gzip(tmp_path: Path, name: str, broken: str) -> None:
    lines = b"".join(json.dumps({"text": f"line {number} " * 3}).encode() + b"\n" for number in range(2000))
    zipped = bytearray(gzip.compress(lines))
    zipped[len(zipped) // 2] ^= 0xFF
    content = {"not gzip": lines, "cut": gzip.compress(lines)[:-20], "flipped": bytes(zipped)}[broken]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"^{path}(:\d+)?: (cannot be read|malformed)"):
        read(path)


def test_a_cut_gzip_names_the_line_it_ends_at(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "x"}\n' * 50)[:-8])  # the checksum at the end is gone
    with pytest.raises(DataError, match=f"^{path}:51: cannot be read"):
        read(path)


def test_documents_without_a_character_are_counted(tmp_path: Path) -> None:
    reading = Reading(skippable=0)
    path = written(tmp_path, "a.jsonl", b'{"text": ""}\n{"text": "x"}\n\n{"text": " "}\n')
    assert [text for text, _ in read(path, reading)] == ["x", " "]
    assert reading.empty == 2
    assert [text for text, _ in read(parquet(tmp_path / "a.parquet", pa.array(["", "x", ""])), reading)] == ["x"]
    assert (reading.empty, reading.skipped) == (4, 0)


def test_skipped_rows_are_capped(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", b'{"text": "x"}\n' + b"oops\n" * 4)
    reading = Reading(skippable=3)
    with pytest.raises(
        DataError, match=rf"^{path}:5: malformed JSON: .* at column 1 .3 rows before it .*data.max_bad_rows=3"
    ):
        read(path, reading)
    assert reading.skipped == 3


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    for path in [
        written(tmp_path, "a.txt", b"abc"),
        written(tmp_path, "a.jsonl.gz", b'{"text": "x"}\n' * 9),
        parquet(tmp_path / "a.parquet", pa.array(["x"] * 5)),
    ]:
        reading = Reading(skippable=0)
        read(path, reading)
        assert reading.done == path.stat().st_size
