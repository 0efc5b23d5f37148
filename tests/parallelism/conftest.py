"""What ranks of a layout send and hold, measured once for each case."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from models.gpt import GPT
from tests.cases import MODELS, SEQUENCES
from tests.cli import ROOT

Measure: TypeAlias = Callable[..., dict[str, int]]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """A function: takes a model's name and degrees, gives what tests/parallelism/measure.py measured."""

    def run(model: str, micro_batch: int = SEQUENCES, options: dict[str, Any] | None = None, **degrees: int) -> Any:
        out = tmp_path / "measured.json"
        arguments = [str(out), json.dumps({"dp": 1, **degrees}), model, str(micro_batch), json.dumps(options or {})]
        command = [sys.executable, "-m", "tests.parallelism.measure", *arguments]
        done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run


def num_parameters(model: str, *beginnings: str) -> int:
    """Parameters of a model of the parity table, or of those whose names begin so; a tied head is the embedding."""
    with torch.device("meta"):
        whole = GPT(MODELS[model])
    return sum(p.numel() for name, p in whole.named_parameters() if not beginnings or name.startswith(beginnings))
