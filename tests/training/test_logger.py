from pathlib import Path

import pytest

from training.logger import wandb_mode


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without W&B settings."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_offline_unless_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_mode("auto") == "online"


def test_a_login_is_found_where_wandb_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine wandb.example.org login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_mode("auto") == "offline"  # logged in elsewhere
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode("auto") == "online"


def test_what_the_user_says_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"
