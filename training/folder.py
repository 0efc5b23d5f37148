"""The folder of a run: decided by one process, claimed at once, never shared by two runs."""

from datetime import datetime
from itertools import count
from pathlib import Path

from training.errors import ConfigError

CLAIM = "config.yaml"  # whoever creates this file owns the folder


def claim_folder(chosen: Path | None, config_yaml: str, key: str = "hydra.run.dir") -> Path:
    """Makes `chosen`, or else a fresh folder under runs/ named by the time, and writes the resolved configuration.

    Claiming is atomic: of two runs started in the same second one gets a number behind its name. ConfigError: the
    chosen folder holds a run already, or can't be made.
    """
    if chosen is not None:
        try:
            chosen.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{key}={chosen} can't be made: {error.strerror}") from error
        if not _claim(chosen, config_yaml):
            raise ConfigError(f"{key}={chosen} holds a run already; valid: a folder without a {CLAIM}")
        return chosen
    stem = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for number in count(1):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        if _claim(folder, config_yaml):
            return folder
    raise AssertionError("unreachable: count() has no end")


def _claim(folder: Path, config_yaml: str) -> bool:
    try:
        with (folder / CLAIM).open("x") as file:
            file.write(config_yaml)
    except FileExistsError:
        return False
    return True
