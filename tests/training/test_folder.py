from pathlib import Path

import pytest

from training.folder import FolderError, check_free, claim_folder


def test_runs_of_the_same_second_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [claim_folder(None, f"run: {number}") for number in range(20)]
    assert len(set(folders)) == 20
    assert [(folder / "config.yaml").read_text() for folder in folders] == [f"run: {number}" for number in range(20)]


def test_a_chosen_folder_is_made_but_never_shared(tmp_path: Path) -> None:
    chosen = tmp_path / "a" / "b"
    check_free(chosen, "hydra.run.dir")
    assert claim_folder(chosen, "x: 1") == chosen
    with pytest.raises(ValueError, match=r"hydra\.run\.dir=.*holds a run already"):
        check_free(chosen, "hydra.run.dir")
    with pytest.raises(FolderError, match="another run has just taken it"):
        claim_folder(chosen, "x: 2")
    assert (chosen / "config.yaml").read_text() == "x: 1"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"hydra\.sweep\.dir=.*can't be made"):
        check_free(tmp_path / "file" / "run", "hydra.sweep.dir")
