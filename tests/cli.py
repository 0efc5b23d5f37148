"""Runs the real commands: what a user types, and what comes back."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from training.job import Job, make_job

ROOT = Path(__file__).parent.parent

# A model and data of which a step takes milliseconds; fp32 on the CPU, whatever machine runs the tests.
TINY = [
    *["model.layers=2", "model.dim=32", "model.heads=4", "model.context=32", "model.vocab_size=64"],
    *["data=synthetic", "data.tokens=20000", "batch.seq_len=32", "batch.tokens=512"],
    *["train.steps=4", "train.eval_every=2", "train.eval_tokens=2000", "train.sample_tokens=0"],
    *["train.footprint_steps=0"],
    *["device=cpu", "precision=fp32", "logger=none"],
]


def make_tiny_job(*overrides: str) -> Job:
    """The job that a command line of TINY and these overrides makes, in this process."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_job(compose("config", [*TINY, *overrides]))


def start_training(
    folder: Path,
    *overrides: str,
    before: tuple[str, ...] = (sys.executable,),
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> "subprocess.Popen[str]":
    """Starts `train.py` with TINY and these overrides, leaving the run in `folder`."""
    command = [*before, str(ROOT / "train.py"), *TINY, f"hydra.run.dir={folder}", *overrides]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or folder.parent,
        env={**os.environ, **(env or {})},
        start_new_session=True,  # whatever it starts can be told by the session
    )


def run_training(folder: Path, *overrides: str, code: int = 0, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs `train.py` to its end and asserts its exit code."""
    process = start_training(folder, *overrides, **options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    assert_all_gone(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def assert_all_gone(process: "subprocess.Popen[str]", seconds: float = 15) -> None:
    """Asserts that within these seconds nothing that this process started is left."""
    deadline = time.monotonic() + seconds
    while left := _session(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _session(leader: int) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "sid,pid,stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines()[1:] if line.split()[0] == str(leader) and "Z" not in line.split()[2]]


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, name: str) -> list[float]:
    """One metric of a run, from the lines that have it."""
    return [line[name] for line in read_metrics(folder) if name in line]
