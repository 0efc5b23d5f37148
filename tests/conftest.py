"""What every run of the tests tells, and ranks that several tests share."""

import os
import secrets
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT

# Another twenty random products every time (tests/products.py), the same in all that this process starts.
os.environ.setdefault("PRODUCTS_SEED", str(secrets.randbelow(10**6)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to draw the same random products again."""
    terminalreporter.write_line(f"random products: PRODUCTS_SEED={os.environ['PRODUCTS_SEED']} draws the same")


@pytest.fixture(scope="session")
def results_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function: takes a module that starts so many ranks, and gives the folder in which they have left results.

    Each is run once, also where it fails.
    """

    @cache
    def run(module: str, num_ranks: int, *chosen: int | str) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
        folder = tmp_path_factory.mktemp(f"ranks{num_ranks}")
        command = [sys.executable, "-m", module, str(num_ranks), str(folder), *map(str, chosen)]
        return folder, subprocess.run(command, cwd=ROOT, timeout=600, capture_output=True, text=True)

    def results(module: str, num_ranks: int, *chosen: int | str) -> Path:
        folder, done = run(module, num_ranks, *chosen)
        assert done.returncode == 0, done.stderr
        return folder

    return results
