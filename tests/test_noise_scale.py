"""batch=noise_scale as a user runs it: the batch follows the noise scale, and a replay of its decisions is exact."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import make_tiny_job, read_metrics, run_training
from training.batch_control import BatchControl

# A tiny model's noise scale is some hundred tokens, and a fraction of 10 has the batch grow beyond it.
GROWING = [
    *["batch.tokens=64", "batch.max_tokens=600", "batch.fraction=10", "batch.patience=2", "noise.every=2"],
    *["train.steps=null", "train.tokens=8000", "train.eval_every=0", "lr.warmup_tokens=640"],
]


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
    assert decisions[0]["noise_scale"] == pytest.approx(decisions[0]["grad_trace"] / decisions[0]["grad_square"])
    sizes = {each["step"]: each["batch_tokens"] for each in steps}
    for each in decisions:  # from the next step on
        assert (sizes[each["step"]], sizes[each["step"] + 1]) == (each["batch_tokens"], each["next_batch_tokens"])
    assert steps[-2]["tokens"] < 8000 <= steps[-1]["tokens"]
    assert steps[-1]["lr"] == pytest.approx(3e-4 * 8**0.5)  # 512 tokens where the first steps had 64
    for name in ("schedule", "speed"):
        assert (grown / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_replay_of_the_decisions_is_exact(grown: Path, tmp_path: Path) -> None:
    stages = json.loads((grown / "batch.json").read_text())["stages"]
    assert [stage["tokens"] for stage in stages] == [64, 128, 256, 512]
    listed = json.dumps(stages).replace('"', "")
    fixed = ["batch.tokens=null", "batch.seq_len=null", f"batch.stages={listed}"]
    run_training(tmp_path / "run", *fixed, *GROWING[4:])
    for found, expected in zip(steps_of(tmp_path / "run"), steps_of(grown), strict=True):
        for name in ("step", "tokens", "batch_tokens", "lr", "loss", "grad_norm", "noise_scale"):
            assert found[name] == expected[name], (expected["step"], name)


def test_two_ranks_decide_as_one_where_nothing_is_close(grown: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "run", *GROWING, "tp=2")
    for found, expected in zip(steps_of(tmp_path / "run"), steps_of(grown), strict=True):
        assert found["batch_tokens"] == expected["batch_tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_run_that_goes_on_from_a_saved_state_decides_as_it_would_have() -> None:
    job = make_tiny_job(*GROWING)
    whole, halved = BatchControl(job), BatchControl(job)
    for number in range(12):
        for control in (whole, halved):
            control.noise.add(1.0, 500.0 + number)
        if number == 6:
            state = json.loads(json.dumps(halved.state()))
            halved = BatchControl(job)
            halved.load(state)
        decided = [control.decide(ALONE, 64 * (number + 1)) for control in (whole, halved)]  # type: ignore[arg-type]
        assert decided[0] == decided[1]
    assert whole.schedule == halved.schedule
    assert len(whole.schedule.stages) == 4


class Alone:
    """A model of one rank, as far as deciding needs it."""

    def largest(self, *numbers: int) -> list[int]:
        return list(numbers)


ALONE = Alone()
