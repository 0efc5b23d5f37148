"""The folder of a run: claimed by rank 0, never shared by two runs."""

from datetime import datetime
from itertools import count
from pathlib import Path

from checks import make_writable

CLAIM = "config.yaml"  # whoever creates this file owns the folder
RUNS = Path("runs")


class FolderError(ValueError):
    """The run's folder can't be had; one line for a person."""


def check_free(chosen: Path | None, key: str) -> None:
    """FolderError where the folder that `key` names, or else runs/, can't be written to or holds a run already."""
    if chosen is not None and (chosen / CLAIM).exists():
        raise FolderError(f"{key}={chosen} holds a run already; valid: a folder without a {CLAIM}")
    make_writable(key, chosen or RUNS, FolderError)


def claim_folder(chosen: Path | None, config_yaml: str) -> Path:
    """Writes the resolved configuration to `chosen`, or to a fresh folder under runs/ that is named by the time.

    Claiming is atomic: of two runs started in the same second one gets a number behind its name. FolderError: another
    run has claimed `chosen` since it was checked.
    """
    if chosen is not None:
        try:
            return _claim(chosen, config_yaml)
        except OSError as error:
            raise FolderError(f"{chosen} was free, but another run has just taken it: {error.strerror}") from error
    stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in count(1):
        try:
            return _claim(RUNS / (stem if number == 1 else f"{stem}-{number}"), config_yaml)
        except FileExistsError:
            continue
    raise AssertionError("unreachable: count() has no end")


def _claim(folder: Path, config_yaml: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CLAIM).open("x", encoding="utf-8") as file:
        file.write(config_yaml)
    return folder
