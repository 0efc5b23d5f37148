from pathlib import Path

import pytest

from training.errors import ConfigError
from training.folder import claim_folder


def test_two_runs_of_the_same_second_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [claim_folder(None, f"run: {number}") for number in range(20)]
    assert len(set(folders)) == 20
    assert [(folder / "config.yaml").read_text() for folder in folders] == [f"run: {number}" for number in range(20)]


def test_a_chosen_folder_is_made_but_never_shared(tmp_path: Path) -> None:
    chosen = tmp_path / "a" / "b"
    assert claim_folder(chosen, "x: 1") == chosen
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=.*holds a run already"):
        claim_folder(chosen, "x: 2")
    assert (chosen / "config.yaml").read_text() == "x: 1"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be made"):
        claim_folder(tmp_path / "file" / "run", "")
