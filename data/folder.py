"""Cache folders that are either finished or not there: written aside, then renamed, under a lock."""

import json
import logging
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import make_writable
from data.errors import DataError

log = logging.getLogger(__name__)

META = "meta.json"


def cache_root(cache_dir: str | None) -> Path:
    """The folder of all cached corpora, made if it is not there. DataError: it can't be written to."""
    if cache_dir is not None:
        root = Path(cache_dir).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ndgpt"
    make_writable("data.cache_dir", root, DataError)
    return root


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What the folder's writer said about it; None if it is not there, or a file of it lacks its full size."""
    try:
        meta = json.loads((folder / META).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return meta if whole else None


def finished_folder(root: Path, key: str, write: Callable[[Path], dict[str, Any]]) -> Path:
    """root/key, written by `write` if it isn't there. `write` gets an empty folder and returns what meta.json says.

    Of several processes one writes and the others wait. A killed one leaves nothing that passes for finished.
    """
    folder = root / key
    if read_meta(folder) is not None:
        return folder
    from filelock import FileLock, Timeout

    try:
        lock = FileLock(root / f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("waiting for another process that prepares the same data (%s)", lock.lock_file)
            lock.acquire()
    except OSError as error:
        raise DataError(f"data.cache_dir={root} can't be written to: {error.strerror}") from None
    try:
        if read_meta(folder) is None:
            _write(folder, write)
    finally:
        lock.release()
    return folder


def _write(folder: Path, write: Callable[[Path], dict[str, Any]]) -> None:
    """Called with the lock held."""
    # The host is in the name because a lock on a network file system may not reach other hosts: theirs is left alone.
    prefix = f".{folder.name}.{platform.node()}"
    for left_behind in folder.parent.glob(f"{prefix}.*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    partial = folder.parent / f"{prefix}.{os.getpid()}"
    partial.mkdir()
    try:
        meta = write(partial)
        meta["sizes"] = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
        (partial / META).write_text(json.dumps(meta, indent=1))
        if folder.exists():
            log.warning("%s is damaged: written again", folder)
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError:
        if read_meta(folder) is None:  # else another host was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
