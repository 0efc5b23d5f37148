"""batch=noise_scale as a user runs it: the batch follows the noise scale, and a replay of its decisions is exact."""

import json
import shlex
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from parallelism.halves import Halves
from tests.cli import make_tiny_job, read_metrics, run_training
from training.batch_control import BatchControl

# A tiny model's noise scale is some hundred tokens: up to ten times that the batch grows.
DOUBLING = ["batch.tokens=64", "batch.double_to=600", "batch.double_below=10", "batch.double_after=2"]
OTHERS = [
    *["noise.every=2", "train.steps=null", "train.tokens=8000", "train.eval_every=0", "lr.warmup_tokens=640"],
    "memory.micro_batch=1",
]
GROWING = [*DOUBLING, *OTHERS]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown") / "run"
    done = run_training(folder, *GROWING)
    assert "batch 64 -> 128 tokens" in done.stdout
    return folder


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "loss" in line]


def decisions_of(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder) if "next_batch_tokens" in line]


def test_the_batch_doubles_up_to_its_limit_and_the_rate_with_its_root(grown: Path) -> None:
    steps, decisions = steps_of(grown), decisions_of(grown)
    assert [each["next_batch_tokens"] for each in decisions] == [128, 256, 512]
    assert all(each["batch_tokens"] < 10 * each["noise_scale"] for each in decisions)
    sizes = {each["step"]: each["batch_tokens"] for each in steps}
    for each in decisions:  # from the next step on
        assert (sizes[each["step"]], sizes[each["step"] + 1]) == (each["batch_tokens"], each["next_batch_tokens"])
    assert steps[-2]["tokens"] < 8000 <= steps[-1]["tokens"]
    assert steps[-1]["lr"] == pytest.approx(3e-4 * 8**0.5)  # 512 tokens where the first steps had 64
    for name in ("schedule", "speed"):
        assert (grown / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_replay_of_the_decisions_is_exact(grown: Path, tmp_path: Path) -> None:
    state = json.loads((grown / "batch.json").read_text())
    assert [stage["tokens"] for stage in state["stages"]] == [64, 128, 256, 512]
    replay = [*shlex.split(state["replay"]), "batch.tokens=null", "batch.seq_len=null"]  # TINY has set these two
    run_training(tmp_path / "run", *replay, *OTHERS)
    for found, expected in zip(steps_of(tmp_path / "run"), steps_of(grown), strict=True):
        for name in ("step", "tokens", "batch_tokens", "lr", "loss", "grad_norm", "noise_scale"):
            assert found[name] == expected[name], (expected["step"], name)


def test_two_ranks_decide_as_one(grown: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "run", *GROWING, "tp=2")
    for found, expected in zip(steps_of(tmp_path / "run"), steps_of(grown), strict=True):
        assert found["batch_tokens"] == expected["batch_tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_run_that_goes_on_from_a_saved_state_decides_as_it_would_have() -> None:
    job = make_tiny_job(*GROWING)
    whole, resumed = BatchControl(job), BatchControl(job)
    for number in range(1, 13):
        if number == 7:
            state = json.loads(json.dumps(resumed.state()))
            resumed = BatchControl(job)
            resumed.load(state)
        # The halves of a step with |G|^2 = 1 and tr(Sigma) = 500: see training/noise_scale.py.
        halves = Halves(torch.full((2,), 0.25 + 500 / 2 / 64), torch.tensor([32, 32]))
        norm = sqrt(1 + 500 / 64 + number % 2 / 100)
        decided = [control.measure(ALONE, halves, norm, 64 * number) for control in (whole, resumed)]
        assert decided[0] == decided[1]
    assert whole.schedule == resumed.schedule
    assert len(whole.schedule.stages) == 4


def test_a_half_without_a_target_is_no_measurement() -> None:
    control = BatchControl(make_tiny_job())
    assert control.measure(ALONE, Halves(torch.tensor([1.0, 0.0]), torch.tensor([9, 0])), 1.0, 9) is None
    assert control.noise.num_measurements == 0


class Alone:
    """A model of one rank, as far as deciding needs it."""

    def largest(self, *numbers: int) -> list[int]:
        return list(numbers)


ALONE: Any = Alone()
