"""Which files are the corpus, and that a second start does not read them again."""

import os
from pathlib import Path
from time import time_ns

import pytest

from data import files
from data.documents import Reading
from data.errors import DataError
from data.files import FileSource, find_files, stdlib_files


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
        os.utime(folder / name, (1, 1))  # long settled


def source(pattern: str) -> FileSource:
    return FileSource(find_files(pattern), name=pattern, text_key="text")


def test_a_folder_a_glob_and_a_file_in_order(tmp_path: Path) -> None:
    make(tmp_path, "b.txt", "a.md", "sub/c.JSONL.gz", "image.png", ".git/d.txt", "[x].txt")
    names = [str(file.relative_to(tmp_path)) for file in find_files(str(tmp_path))]
    assert names == ["[x].txt", "a.md", "b.txt", "sub/c.JSONL.gz"]
    assert find_files(f"{tmp_path}/**/*.JSONL.gz") == [tmp_path / "sub/c.JSONL.gz"]
    assert find_files(f"{tmp_path}/[x].txt") == [tmp_path / "[x].txt"]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("nothing.txt", "data.path=.*nothing.txt: no such file or folder"),
        ("*.parquet", r"data.path=.*/\*.parquet: no file matches"),
        ("*.png", r".*image.png: not a kind of file that can be read; valid: \*.txt \*.txt.gz \*.md"),
        ("sub", r"data.path=.*/sub: the folder holds none of \*.txt"),
        ("*.md", ".*gone.md: no such file"),
    ],
)
def test_no_such_files(tmp_path: Path, pattern: str, problem: str) -> None:
    make(tmp_path, "image.png", "a.txt", "sub/image.png")
    (tmp_path / "gone.md").symlink_to(tmp_path / "elsewhere.md")
    with pytest.raises(DataError, match=f"^{problem}"):
        source(f"{tmp_path}/{pattern}")


def test_the_key_follows_the_content_and_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "in", "a.txt", "b.txt")
    cache = tmp_path / "cache"
    key = source(f"{tmp_path}/in").content_key(cache)
    assert len(set(key)) == 2
    now = time_ns()
    (tmp_path / "in" / "b.txt").write_text("B.txt")  # as long as before
    os.utime(tmp_path / "in" / "b.txt", ns=(now, now))
    changed = source(f"{tmp_path}/in").content_key(cache)
    assert (changed[0] == key[0], changed[1] == key[1]) == (True, False)
    assert source(f"{tmp_path}/in").content_key(cache) == changed
    (tmp_path / "in" / "b.txt").write_text("b.TXT")  # within the same tick of the clock
    os.utime(tmp_path / "in" / "b.txt", ns=(now, now))
    assert source(f"{tmp_path}/in").content_key(cache) != changed

    os.utime(tmp_path / "in" / "b.txt", (2, 2))
    settled = source(f"{tmp_path}/in").content_key(cache)
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    assert source(f"{tmp_path}/in").content_key(cache) == settled
    (cache / "digests.json").write_text("{broken")
    with pytest.raises(pytest.fail.Exception):
        source(f"{tmp_path}/in").content_key(cache)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    make(tmp_path, "a.txt")
    opened = source(f"{tmp_path}/a.txt")
    (tmp_path / "a.txt").write_text("another text")
    with pytest.raises(DataError, match=r"a\.txt: changed while it was read"):
        list(opened.documents(Reading(skippable=0)))


def test_the_standard_library() -> None:
    found = stdlib_files()
    names = {file.name for file in found}
    assert {"argparse.py", "topics.py"} <= names
    parts = {part for file in found for part in file.parts}
    assert not parts & {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
    assert sum(file.stat().st_size for file in found) > 5e6


def test_standard_library_files_that_hold_no_text_are_counted(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "test/b.py", "c.rst")
    (tmp_path / "__init__.py").touch()
    (tmp_path / "latin.py").write_bytes(b"\xe9")
    opened = FileSource(stdlib_files(tmp_path), name="stdlib", text_key="text", lenient=True)
    reading = Reading(skippable=0)
    assert [text for text, _ in opened.documents(reading)] == ["a.py", "c.rst"]
    assert (reading.empty, reading.skipped) == (1, 1)
    with pytest.raises(DataError, match="holds no"):
        stdlib_files(tmp_path / "test" / "none")
