"""Readers: one file in, its documents out, one by one, each with where it came from.

A txt or md file is one document; a line of jsonl or a row of parquet is one. Each kind may be gzipped. Nothing is
stripped, normalised, truncated or dropped without being counted in a `Reading`.
"""

import codecs
import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast

from data.errors import DataError


class Document(NamedTuple):
    text: str
    origin: str  # the file, file:line or file: row N, for messages


@dataclass
class Reading:
    """What one pass over a corpus has met so far."""

    skippable: int  # malformed rows to pass over before one is an error
    skipped: int = 0  # malformed rows passed over
    empty: int = 0  # documents without a single character, which hold nothing to learn from
    done: float = 0.0  # bytes of files, or rows of a hub dataset, read so far: for the progress bar

    def bad_row(self, where: str, problem: str) -> None:
        """Counts a malformed row; raises DataError when it is one more than may be passed over."""
        if self.skipped == self.skippable:
            if self.skippable:
                hint = f"{self.skipped} rows before it were skipped and data.max_bad_rows={self.skippable}"
            else:
                hint = "data.bad_rows=skip passes such rows over"
            raise DataError(f"{where}: {problem} ({hint})")
        self.skipped += 1


def text_problem(text: object) -> str | None:
    """What keeps a row's value from being text; None if it is text."""
    if text is None:
        return "is null"
    if not isinstance(text, str):
        return f"is {type(text).__name__}, not text"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return "holds a lone surrogate, which is not Unicode text"
    return None


def read_text(path: Path, reading: Reading, text_key: str) -> Iterator[Document]:
    """The whole file as one document. It is held in memory at once."""
    start = reading.done
    with _opened(path) as (file, raw):
        data = file.read().removeprefix(codecs.BOM_UTF8)
        reading.done = start + raw.tell()
    if not data:
        raise DataError(f"{path}: the file is empty")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from None
    yield Document(text, str(path))


def read_jsonl(path: Path, reading: Reading, text_key: str) -> Iterator[Document]:
    """One document per line, from its `text_key`."""
    start, number = reading.done, 0
    with _opened(path, lambda: f":{number + 1}") as (file, raw):
        for number, line in enumerate(file, 1):
            reading.done = start + raw.tell()
            where = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                reading.empty += 1
                continue
            try:
                row = json.loads(line.decode())
            except UnicodeDecodeError as error:
                reading.bad_row(where, f"not UTF-8 text (byte 0x{line[error.start]:02x} at column {error.start + 1})")
                continue
            except json.JSONDecodeError as error:
                reading.bad_row(where, f"malformed JSON: {error.msg} at column {error.colno}")
                continue
            except (ValueError, RecursionError) as error:  # a number of 5000 digits; a thousand brackets
                reading.bad_row(where, f"malformed JSON: {error}")
                continue
            if not isinstance(row, dict):
                reading.bad_row(where, f"the row is {type(row).__name__}, not an object")
            elif text_key not in row:
                reading.bad_row(where, f"the row has no {text_key!r} (data.text_key), only {_names(row)}")
            elif problem := text_problem(row[text_key]):
                reading.bad_row(where, f"{text_key!r} {problem}")
            elif not row[text_key]:
                reading.empty += 1
            else:
                yield Document(row[text_key], where)
    if number == 0:
        raise DataError(f"{path}: the file is empty")


def read_parquet(path: Path, reading: Reading, text_key: str) -> Iterator[Document]:
    """One document per row, from the column `text_key`, a few rows in memory at a time. Rows are counted from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    start = reading.done
    with _opened(path, errors=(pa.ArrowException,)) as (file, _):
        if not file.read(1):
            raise DataError(f"{path}: the file is empty")
        file.seek(0)
        size = path.stat().st_size
        table = pq.ParquetFile(file)
        if text_key not in table.schema_arrow.names:
            raise DataError(f"{path}: no column {text_key!r} (data.text_key), only {_names(table.schema_arrow.names)}")
        kind = table.schema_arrow.field(text_key).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{path}: column {text_key!r} holds {kind}, not text")
        row, num_rows = 0, table.metadata.num_rows
        if num_rows == 0:
            raise DataError(f"{path}: the file is empty (no rows)")
        for batch in table.iter_batches(batch_size=1024, columns=[text_key]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            # As bytes, so that a text which is not UTF-8 is one bad row and not the end of its batch.
            for value in column.cast(pa.large_binary()).to_pylist():
                row += 1
                if value is None:
                    reading.bad_row(f"{path}: row {row}", f"{text_key!r} is null")
                elif not value:
                    reading.empty += 1
                elif (text := _decoded(value)) is None:
                    reading.bad_row(f"{path}: row {row}", f"{text_key!r} is not UTF-8 text")
                else:
                    yield Document(text, f"{path}: row {row}")
            reading.done = start + size * row / num_rows


Reader = Callable[[Path, Reading, str], Iterator[Document]]
READERS: dict[str, Reader] = {".txt": read_text, ".md": read_text, ".jsonl": read_jsonl, ".parquet": read_parquet}


@contextmanager
def _opened(
    path: Path, line: Callable[[], str] = str, errors: tuple[type[Exception], ...] = ()
) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The file's content and, to tell how far it is read, the file itself: not the same if it is gzipped.

    Whatever goes wrong while it is open, `errors` included, comes out as a DataError that names path and line.
    """
    expected: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, *errors)
    try:
        with path.open("rb") as raw:
            if path.suffix.lower() != ".gz":
                yield raw, raw
            elif not path.name.lower().endswith(".parquet.gz"):
                yield cast(IO[bytes], gzip.GzipFile(fileobj=raw)), raw
            else:  # parquet is read from its end, which gzip can't
                with tempfile.TemporaryFile() as unpacked:
                    shutil.copyfileobj(gzip.GzipFile(fileobj=raw), unpacked)
                    unpacked.seek(0)
                    yield unpacked, raw
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except expected as error:
        raise DataError(f"{path}{line()}: cannot be read: {error}") from error


def _decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _names(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (", ..." if len(listed) > 8 else "") if listed else "nothing"
