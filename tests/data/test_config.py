"""Settings that can't be used are refused in one line that names the key, the value and what is valid."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError

from tests.data.conftest import CONF, Configure


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"bad_rows": "skp"}, "data.bad_rows=skp is not one of error, skip; did you mean skip?"),
        ({"source": "file", "path": "x"}, "data.source=file is not one of .*; did you mean files?"),
        ({"source": "zzz"}, "data.source=zzz is not one of stdlib, files, hf, synthetic$"),
        ({"source": "files"}, "data.source=files needs data.path; valid: "),
        ({"path": "x"}, "data.path=x is read by data=files alone"),
        ({"name": "x"}, "data.name=x is read by data=hf alone"),
        ({"source": "hf"}, "data.source=hf needs data.name; valid: "),
        ({"streaming": True}, "data.streaming=true with data.source=stdlib; valid: data.source=hf"),
        ({"tokenizer": ""}, "data.tokenizer is empty"),
        ({"held_out": 0.0}, "data.held_out=0.0 is not valid; valid: above 0 and below 1"),
        ({"held_out": 1.0}, "data.held_out=1.0 is not valid"),
        ({"workers": 0}, "data.workers=0 must be at least 1, and finite"),
        ({"max_bad_rows": -1}, "data.max_bad_rows=-1 must be at least 0, and finite"),
        ({"tokens": 1023}, "data.tokens=1023 must be at least 1024, and finite"),
    ],
)
def test_refused(configure: Configure, overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        configure(**overrides)
    assert "\n" not in str(caught.value)


def test_unknown_key(configure: Configure) -> None:
    with pytest.raises(ConfigKeyError):
        configure(pth="x")


def test_every_group_file_builds_on_the_base() -> None:
    base = OmegaConf.load(CONF / "base.yaml")
    names = {file.stem for file in CONF.glob("*.yaml")} - {"base"}
    assert names == {"stdlib", "files", "hf", "synthetic"}
    for name in names:
        own = OmegaConf.load(CONF / f"{name}.yaml")
        assert isinstance(own, DictConfig)
        assert own.pop("defaults") == ["base", "_self_"]
        assert set(own) <= set(base)
        assert own.source == name


def test_settings_import_nothing_heavy() -> None:
    heavy = "{'torch', 'datasets', 'tokenizers', 'pyarrow', 'rich'}"
    code = f"import sys, data.config, data.corpus, data.cache; print(*{heavy} & set(sys.modules))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
