"""Settings as a run gets them: from the real YAML, typed, with a cache of the test's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from data.config import DataConfig

CONF = Path(__file__).parents[2] / "conf" / "data"
Configure = Callable[..., DataConfig]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    def build(**overrides: Any) -> DataConfig:
        base = OmegaConf.load(CONF / "base.yaml")
        overrides = {"cache_dir": str(tmp_path / "cache"), **overrides}
        merged = OmegaConf.merge(OmegaConf.structured(DataConfig), base, overrides)
        return cast(DataConfig, OmegaConf.to_object(merged))

    return build


@pytest.fixture
def texts(tmp_path: Path) -> Callable[..., str]:
    """Writes one txt file per text and gives the glob that finds them in order."""

    def write(*documents: str) -> str:
        folder = tmp_path / "texts"
        folder.mkdir(exist_ok=True)
        for number, document in enumerate(documents):
            (folder / f"{number:04}.txt").write_text(document, newline="")
        return str(folder / "*.txt")

    return write
