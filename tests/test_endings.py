"""How runs end before their last step: a rank that fails, signals, kill -9. Real processes, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli import ROOT, assert_all_gone, column, read_metrics, run_training, start_training


def wait_for_step(folder: Path, step: int, process: "subprocess.Popen[str]") -> None:
    """Returns when the run has finished that step."""
    for _ in range(600):
        if (folder / "metrics.jsonl").exists() and len((folder / "metrics.jsonl").read_text().splitlines()) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within a minute")


@pytest.mark.parametrize("place", ["data", "forward", "evaluation", "killed"])
def test_a_failing_rank_is_named_once_and_ends_the_run(place: str, tmp_path: Path) -> None:
    began = time.monotonic()
    done = run_training(
        tmp_path / "run",
        "dp=3",
        "batch.tokens=480",
        before=(sys.executable, "-m", "tests.broken", place),
        env={"PYTHONPATH": str(ROOT)},
        code=1,
    )
    assert time.monotonic() - began < 30
    assert done.stderr.count("rank 1 failed:") == 1
    reason = "SIGKILL" if place == "killed" else f"KeyError: 'broken on purpose in {place}'"
    assert done.stderr.count(reason) == 1
    assert "rank 0 failed" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_ends_the_run(number: int, code: int, tmp_path: Path) -> None:
    process = start_training(tmp_path / "run", "dp=2", "train.steps=100000")
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    assert "Traceback" not in err
    steps = column(tmp_path / "run", "loss")
    assert 3 <= len(steps) < 100_000
    assert f"stopped after step {len(steps)} of 100000" in out
    assert "results in" in out
    assert_all_gone(process)


def test_a_signal_to_the_whole_process_group_is_one_wish(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run", "dp=2", "train.steps=100000")
    wait_for_step(tmp_path / "run", 3, process)
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does, and a terminal with Ctrl-C
    out, err = process.communicate(timeout=20)
    assert process.returncode == 143, err
    assert "stopped after step" in out
    assert_all_gone(process)


def test_two_signals_at_once_leave_nothing_behind(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run", "dp=2", "train.steps=100000")
    wait_for_step(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode in (130, 143)
    assert_all_gone(process)


def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run", "dp=2", "train.steps=100000")
    time.sleep(1.5)  # torch is being imported, or the ranks are being started
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode in (130, -signal.SIGINT)  # the latter while Python itself starts
    assert_all_gone(process)


def test_a_second_signal_ends_the_run_within_its_step(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run", "train.eval_every=1", "train.eval_tokens=null", "data.tokens=4e7")
    wait_for_step(tmp_path / "run", 1, process)
    time.sleep(0.5)  # in an evaluation that takes minutes
    process.send_signal(signal.SIGTERM)
    time.sleep(1.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert_all_gone(process)


def test_metrics_are_whole_after_kill_9_and_no_process_stays(tmp_path: Path) -> None:
    process = start_training(tmp_path / "run", "dp=2", "train.steps=100000")
    wait_for_step(tmp_path / "run", 3, process)
    process.kill()
    process.communicate(timeout=20)
    assert_all_gone(process)
    steps = [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
