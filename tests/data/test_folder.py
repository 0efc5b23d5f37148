"""A cache folder is finished or not there."""

import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from data.errors import DataError
from data.folder import META, cache_root, finished_folder, read_meta

ROOT = Path(__file__).parents[2]


def write(folder: Path) -> dict[str, Any]:
    (folder / "a.bin").write_bytes(b"12345")
    return {"answer": 42}


def never(folder: Path) -> dict[str, Any]:
    raise AssertionError("written again")


def test_written_once(tmp_path: Path) -> None:
    folder = finished_folder(tmp_path / "new" / "cache", "key", write)
    assert read_meta(folder) == {"answer": 42, "sizes": {"a.bin": 5}}
    assert finished_folder(tmp_path / "new" / "cache", "key", never) == folder
    assert {path.name for path in folder.parent.iterdir()} <= {"key", "key.lock"}


@pytest.mark.parametrize("damage", ["cut", "gone", "no meta", "half a meta", "not an object"])
def test_a_damaged_folder_is_written_again(tmp_path: Path, damage: str) -> None:
    folder = finished_folder(tmp_path, "key", write)
    if damage == "cut":
        os.truncate(folder / "a.bin", 4)
    elif damage == "gone":
        (folder / "a.bin").unlink()
    elif damage == "no meta":
        (folder / META).unlink()
    else:
        (folder / META).write_text('{"answer": 4' if damage == "half a meta" else "[]")
    assert read_meta(folder) is None
    assert finished_folder(tmp_path, "key", write) == folder
    assert (folder / "a.bin").read_bytes() == b"12345"
    assert read_meta(folder) is not None


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        write(folder)
        raise DataError("bad row")

    with pytest.raises(DataError, match="bad row"):
        finished_folder(tmp_path, "key", fail)
    assert {path.name for path in tmp_path.iterdir()} <= {"key.lock"}


def test_a_killed_writer_leaves_nothing_that_is_taken_for_finished(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from data.folder import finished_folder\n"
        "def write(folder):\n"
        "    (folder / 'a.bin').write_bytes(b'12')\n"
        "    os.kill(os.getpid(), 9)\n"
        "finished_folder(pathlib.Path(sys.argv[1]), 'key', write)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    assert "key" not in left
    assert len(left) == 2  # the lock and the unfinished folder
    folder = finished_folder(tmp_path, "key", write)
    assert read_meta(folder) is not None
    assert {path.name for path in tmp_path.iterdir()} <= {"key", "key.lock"}


def test_one_writes_and_the_others_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    writing, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path) -> dict[str, Any]:
        writing.set()
        assert go_on.wait(20)
        return write(folder)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(finished_folder, tmp_path, "key", slowly)
        assert writing.wait(20)
        second = pool.submit(finished_folder, tmp_path, "key", never)
        while "waiting for another process" not in caplog.text:
            assert not second.done()
            sleep(0.01)
        go_on.set()
        assert first.result(20) == second.result(20) == tmp_path / "key"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.cache_dir=.*/file/cache can't be .*: Not a directory"):
        finished_folder(tmp_path / "file" / "cache", "key", write)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_root(None) == Path("/xdg/ndgpt")
    assert cache_root("~/own") == Path("/home/me/own")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == Path("/home/me/.cache/ndgpt")
