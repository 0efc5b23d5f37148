"""A corpus made of files: `data=files` and `data=stdlib`."""

import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from time import time

from data.documents import READERS, Document, Reading, read_text
from data.errors import DataError

log = logging.getLogger(__name__)

# Neither written by the standard library's authors nor good text: installed packages, caches and test fixtures.
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}


class FileSource:
    """The documents of `files`, in that order.

    `lenient`: an empty file or one that is not UTF-8 is passed over and counted, not an error. Only for the standard
    library, whose files the user did not choose.
    """

    def __init__(self, files: list[Path], *, name: str, text_key: str, lenient: bool = False) -> None:
        self.files, self.name, self.text_key, self.lenient = files, name, text_key, lenient
        self.stats = [_stat(file) for file in files]
        self.size = float(sum(size for size, _ in self.stats))

    def content_key(self, cache: Path) -> list[str]:
        """One string per file: its kind and a hash of its bytes, remembered in `cache`."""
        digests = _digests(self.files, self.stats, cache / "digests.json")
        return [f"{_kind(file)}:{digest}" for file, digest in zip(self.files, digests)]

    def documents(self, reading: Reading) -> Iterator[Document]:
        """Every document, once. Raises DataError if a file was written to since its hash was taken."""
        done = 0.0
        for file, (size, modified) in zip(self.files, self.stats):
            reader = READERS.get(_kind(file), read_text)
            if self.lenient and size == 0:
                reading.empty += 1
                continue
            try:
                yield from reader(file, reading, self.text_key)
            except DataError as error:
                if not self.lenient:
                    raise
                reading.skipped += 1
                log.warning("passed over: %s", error)
            if _stat(file) != (size, modified):
                raise DataError(f"{file}: changed while it was read; start again")
            done += size
            reading.done = done


def stdlib_files(folder: Path | None = None) -> list[Path]:
    """The standard library's own sources and docs (pydoc_data/topics.py holds the language reference), sorted."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = _walk(folder, {".py", ".rst", ".txt"}, NOT_STDLIB)
    if not files:
        raise DataError(f"data.source=stdlib: {folder} holds no *.py; valid: data=files with data.path")
    return files


def find_files(pattern: str) -> list[Path]:
    """The files that `data.path` means, sorted: one file, those below a folder of a known kind, or a glob's matches."""
    path = Path(pattern).expanduser()
    valid = " ".join(f"*{kind} *{kind}.gz" for kind in READERS)
    if path.is_dir():
        if files := _walk(path, set(READERS), set()):
            return files
        raise DataError(f"data.path={pattern}: the folder holds none of {valid}")
    if path.exists():
        files = [path]
    elif not glob.has_magic(pattern):
        raise DataError(f"data.path={pattern}: no such file or folder")
    else:
        matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 (Path.glob takes no absolute pattern)
        files = sorted(match for match in matches if not match.is_dir())
        if not files:
            raise DataError(f"data.path={pattern}: no file matches")
    for file in files:
        if _kind(file) not in READERS:
            raise DataError(f"{file}: not a kind of file that can be read; valid: {valid}")
    return files


def _walk(folder: Path, kinds: set[str], skip: set[str]) -> list[Path]:
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(where, name) for name in names if not name.startswith(".") and _kind(Path(name)) in kinds]
    return sorted(found)


def _kind(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


def _stat(file: Path) -> tuple[int, int]:
    """(bytes, time of the last change in ns)"""
    try:
        stat = file.stat()
    except FileNotFoundError:
        raise DataError(f"{file}: no such file") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from None
    return stat.st_size, stat.st_mtime_ns


def _digests(files: list[Path], stats: list[tuple[int, int]], memo: Path) -> list[str]:
    """A hash of each file's bytes. `memo` remembers them by path, size and time, so that a second start reads none."""
    try:
        known = json.loads(memo.read_text())
    except (OSError, ValueError):
        known = {}
    found, changed = [], False
    for file, (size, modified) in zip(files, stats):
        path = str(file.absolute())
        entry = known.get(path)
        if entry is None or entry[:2] != [size, modified]:
            try:
                with file.open("rb") as content:
                    digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            except OSError as error:
                raise DataError(f"{file}: cannot be read: {error.strerror}") from None
            entry = [size, modified, digest]
            # A file changed within a clock tick could change again and look the same: remember only settled ones.
            if time() - modified / 1e9 > 2:
                known[path], changed = entry, True
        found.append(entry[2])
    if changed:
        memo.parent.mkdir(parents=True, exist_ok=True)
        partial = memo.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(known))
        partial.replace(memo)  # atomic; of two writers at once the last one is remembered
    return found
