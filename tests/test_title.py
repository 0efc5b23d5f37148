"""The command of the README's first page: tensor times pipeline parallel, with the losses of one rank."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli import ROOT

TITLE = ["train.steps=3", "device=cpu", "precision=fp32", "logger=none"]


def train(folder: Path, *overrides: str) -> "subprocess.Popen[bytes]":
    """Starts the default model on a layout."""
    command = [sys.executable, str(ROOT / "train.py"), *TITLE, *overrides, f"hydra.run.dir={folder}"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=folder.parent, stdout=log, stderr=log, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", log: Path, seconds: float) -> int:
    """Waits for the run to end well, as long as it may take; returns the most bytes that all its processes held."""
    began, looked, most = time.monotonic(), time.monotonic(), 0
    try:
        while process.poll() is None and time.monotonic() - began < seconds:
            time.sleep(2)
            if time.monotonic() > looked + 20:  # which takes seconds, with 128 ranks
                most, looked = max(most, proportional_set_size(process.pid)), time.monotonic()
        assert process.poll() == 0, log.read_text()
    finally:
        for folder in processes(process.pid):
            with suppress(OSError):
                os.kill(int(folder.name), signal.SIGKILL)
    return most


def lines(folder: Path) -> list[dict[str, Any]]:
    """What the run has recorded."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_numbers(folder: Path, one_rank: Path) -> None:
    """CONTRACT 3."""
    found, expected = lines(folder), lines(one_rank)
    assert len(found) == len(expected) == 4  # three steps and the evaluation
    for line, wanted in zip(found, expected):
        names = {"eval_loss": 1e-5} if "eval_loss" in wanted else {"loss": 1e-5, "grad_norm": 1e-4}
        for name, within in names.items():
            assert line[name] == pytest.approx(wanted[name], rel=within), (name, line["step"])


def test_the_title_command_on_sixteen_ranks(tmp_path: Path) -> None:
    quick = ["data=synthetic", "train.eval_tokens=2048", "train.sample_tokens=0"]
    finish(train(tmp_path / "one", "parallel=dp", *quick), tmp_path / "one.log", seconds=120)
    finish(train(tmp_path / "nd", "parallel=nd", "tp=4", "pp=4", *quick), tmp_path / "nd.log", seconds=240)
    assert_same_numbers(tmp_path / "nd", tmp_path / "one")


@pytest.mark.slow
def test_the_title_command(tmp_path: Path) -> None:
    """128 ranks on two cores: within four minutes, and in less than 12 GiB for all of them together."""
    finish(train(tmp_path / "one", "parallel=dp"), tmp_path / "one.log", seconds=300)
    most = finish(train(tmp_path / "nd", "parallel=nd", "tp=8", "pp=16"), tmp_path / "nd.log", seconds=240)
    assert_same_numbers(tmp_path / "nd", tmp_path / "one")
    assert 2**30 < most < 12 * 2**30


def processes(session: int) -> Iterator[Path]:
    """The folders in /proc of all processes of a session."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getsid(int(folder.name)) == session:
                yield folder


def proportional_set_size(session: int) -> int:
    """Bytes of all processes of a session, those that several share divided among them."""
    total = 0
    for folder in processes(session):
        with suppress(OSError, IndexError):
            total += 1024 * int((folder / "smaps_rollup").read_text().split("\nPss:")[1].split()[0])
    return total
