"""The folder of a run: claimed by rank 0, never shared by two runs."""

from datetime import datetime
from itertools import count
from pathlib import Path

CLAIM = "config.yaml"  # whoever creates this file owns the folder


def check_free(folder: Path, key: str) -> None:
    """ValueError where the folder that `key` names holds a run already, or can't be made."""
    if (folder / CLAIM).exists():
        raise ValueError(f"{key}={folder} holds a run already; valid: a folder without a {CLAIM}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{key}={folder} can't be made: {error.strerror}") from error


def claim_folder(chosen: Path | None, config_yaml: str) -> Path:
    """Writes the resolved configuration to `chosen`, or to a fresh folder under runs/ that is named by the time.

    Claiming is atomic: of two runs started in the same second one gets a number behind its name. FileExistsError:
    another run has claimed `chosen` since it was checked.
    """
    if chosen is not None:
        return _claim(chosen, config_yaml)
    stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in count(1):
        try:
            return _claim(Path("runs") / (stem if number == 1 else f"{stem}-{number}"), config_yaml)
        except FileExistsError:
            continue
    raise AssertionError("unreachable: count() has no end")


def _claim(folder: Path, config_yaml: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / CLAIM).open("x", encoding="utf-8") as file:
        file.write(config_yaml)
    return folder
