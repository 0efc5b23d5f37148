"""A ramp of four stages under every layout: batches, rates, losses and noise scales of one rank, step by step.

python -m tests.training.test_ramp 2 OUT     two ranks train on the layouts that are for two, and leave OUT/LAYOUT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data.corpus import Corpus
from memory.footprint import Footprint
from parallelism.launch import run_ranks
from parallelism.mesh import start_process_group
from parallelism.stop import Stop
from tests.cli import make_tiny_job
from training.batch_control import BatchControl
from training.job import Job
from training.loop import own_sequences, train
from training.metrics import StepMetrics
from training.run import build_model, build_optimizer, prepare_data
from training.schedule import batch_at

STAGES = [
    {"from_tokens": 0, "tokens": 256, "seq_len": 16},
    {"from_tokens": 600, "tokens": 512, "seq_len": 32},
    {"from_tokens": 2000, "tokens": 256, "seq_len": 32, "lr_factor": 0.5},
    {"from_tokens": 2600, "tokens": 768, "seq_len": 16},
]
RAMP = [
    *["batch.tokens=null", "batch.seq_len=null", "batch.stages=" + json.dumps(STAGES).replace('"', "")],
    *["train.steps=12", "train.eval_every=5", "model.layers=4", "memory.micro_batch=2", "noise.every=2"],
]
LAYOUTS = [
    "dp=2",
    "parallel=fsdp dp=2",
    "tp=2 parallel.sequence_parallel=true",
    "pp=2",
    "pp=2 parallel.pp_schedule=interleaved_1f1b",
    "cp=2",
    "dp=2 compile=true",
    "pp=2 tp=2 dp=2",
]


# CONTRACT 3; the noise scale comes from norms.
TOLERANCES = {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 1e-4, "noise_scale": 1e-4}


class Lines:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def record(self, metrics: dict[str, Any]) -> None:
        self.lines.append(metrics)

    def picture(self, name: str, title: str, draw: Any) -> None:
        pass

    def finish(self) -> None:
        pass


def trained(job: Job, device: torch.device, stop: Stop) -> list[dict[str, Any]]:
    """Trains in this rank, and gives its lines of metrics."""
    model, sink = build_model(job, device), Lines()
    optimizer, control = build_optimizer(job, model, device), BatchControl(job)
    corpus, footprint, metrics = prepare_data(job), Footprint(device, {}, 0), StepMetrics(job, None)
    assert train(job, model, optimizer, corpus, control, footprint, metrics, [sink], device, stop) == 0
    return sink.lines


def run_layouts(stop: Stop, jobs: dict[str, Job], out: Path) -> int:
    """One rank: all of the jobs."""
    device = start_process_group("cpu", timeout_minutes=1)
    for name, job in jobs.items():
        lines = trained(job, device, stop)
        if dist.get_rank() == 0:
            (out / f"{name}.json").write_text(json.dumps(lines))
    dist.destroy_process_group()
    return 0


@pytest.fixture
def lines_of(results_of_ranks: Any) -> Any:
    """A function: the lines of a run on so many ranks, by its layout."""

    def lines(num_ranks: int, layout: str) -> list[dict[str, Any]]:
        folder = results_of_ranks("tests.training.test_ramp", num_ranks)
        return json.loads((folder / f"{layout}.json").read_text())

    return lines


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_goes_through_the_ramp_as_one_rank_does(layout: str, lines_of: Any) -> None:
    found = lines_of(make_tiny_job(*RAMP, *layout.split()).layout.world_size, layout)
    expected = lines_of(1, "dp=1")
    assert len(found) == len(expected) == 12 + 3
    for line, other in zip(found, expected):
        assert line.keys() == other.keys()
        for name in ("step", "tokens", "lr", "batch_tokens", "seq_len"):
            assert line.get(name) == other.get(name)
        for name in TOLERANCES.keys() & other.keys():
            same = other[name] if other[name] is None else pytest.approx(other[name], rel=TOLERANCES[name])
            assert line[name] == same, (other["step"], name)
    assert expected[-2]["noise_scale"] > 0


def test_stages_begin_at_their_steps_with_the_square_root_of_the_batch(lines_of: Any) -> None:
    steps = [line for line in lines_of(1, "dp=1") if "loss" in line]
    assert [line["batch_tokens"] for line in steps] == [256] * 3 + [512] * 3 + [256] * 2 + [768] * 4
    assert [line["seq_len"] for line in steps] == [16] * 3 + [32] * 5 + [16] * 4
    assert [line["micro_batches"] for line in steps] == [8] * 6 + [4] * 2 + [24] * 4
    total = 3 * 256 + 3 * 512 + 2 * 256 + 4 * 768
    assert steps[-1]["tokens"] == total
    final = 3e-4 * 3**0.5  # the end of a cosine that is meant for 256 tokens
    assert steps[-1]["lr"] == pytest.approx(final, rel=1e-12)


class Positions:
    """A stream whose tokens are their own places in it."""

    stretch = 1000

    def read(self, start: int, length: int) -> np.ndarray:
        return np.arange(start, start + length)


def test_no_token_is_taken_twice_where_sequences_change_their_length() -> None:
    job = make_tiny_job(*RAMP)
    corpus = Corpus(Positions(), np.zeros(2, np.int64), None, 64, None)
    batch, tokens, taken = job.budget.batch, 0, []
    while tokens < batch.starts[-1]:
        own = own_sequences(job, corpus, tokens, batch, (0, 1), torch.device("cpu"))
        taken += torch.cat([inputs for inputs, _ in own]).flatten().tolist()
        tokens += batch_at(tokens, batch).tokens
    assert len(set(taken)) == len(taken) == tokens
    # The first step comes from all over the first stretch, of 62 windows of 16; the next length goes on behind it.
    assert max(taken[:256]) - min(taken[:256]) > 500
    assert min(taken[768:1280]) >= 62 * 16 > max(taken[:768])


if __name__ == "__main__":
    num_ranks, out = int(sys.argv[1]), Path(sys.argv[2])
    jobs = {layout: make_tiny_job(*RAMP, *layout.split()) for layout in ["dp=1", *LAYOUTS]}
    own = {layout: job for layout, job in jobs.items() if job.layout.world_size == num_ranks}
    sys.exit(run_ranks(run_layouts, own, out, num_ranks=num_ranks))
