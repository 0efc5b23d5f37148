"""The commands of the README as a user runs them: real processes, real ranks."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from models.flops import num_parameters
from tests.cli import ROOT, TINY, column, make_tiny_job, read_metrics, run_training, start_training
from training.loop import _dropout_seed

# CONTRACT 4: the keys of a step's line.
STEP_KEYS = {
    "step", "tokens", "loss", "grad_norm", "lr", "batch_tokens", "seq_len", "micro_batches", "step_seconds",
    "tokens_per_second", "tflops_per_device", "mfu", "hfu", "noise_scale", "memory",
}  # fmt: skip
MEASURED = {"step_seconds", "tokens_per_second", "tflops_per_device", "mfu", "hfu", "memory"}


def slow(*layout: str) -> Any:
    """A layout that `make bench` runs: the parity table and the ramp have it, or one much like it, in every run."""
    return pytest.param([*layout], marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one_rank") / "run"
    run_training(folder)
    return folder


def test_a_run_leaves_what_the_contract_says(one_rank: Path) -> None:
    lines = read_metrics(one_rank)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["tokens"] for line in steps] == [512, 1024, 1536, 2048]
    assert all(set(line) == STEP_KEYS for line in steps)
    assert all(line["mfu"] is None for line in steps)  # no known peak of a CPU
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4]
    # Untrained, the model is near uniform over its 64 tokens.
    assert steps[0]["loss"] == pytest.approx(math.log(64), abs=0.3)
    assert steps[-1]["lr"] == pytest.approx(3e-4)
    assert "steps: 4" in (one_rank / "config.yaml").read_text()


def test_the_same_seed_twice_gives_the_same_run(one_rank: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "again")
    run_training(tmp_path / "other", "seed=1")

    def settled(folder: Path) -> list[dict[str, Any]]:
        return [{key: line[key] for key in line.keys() - MEASURED} for line in read_metrics(folder)]

    assert settled(tmp_path / "again") == settled(one_rank)
    assert settled(tmp_path / "other") != settled(one_rank)


@pytest.mark.parametrize(
    "layout",
    [
        slow("dp=4", "memory=accum"),
        ["parallel=hsdp", "parallel.reshard=false", "memory.micro_batch=2"],
        ["parallel=nd", "dp=2", "parallel.pp_schedule=zb_h1", "parallel.sequence_parallel=true"],
        slow("cp=2", "tp=2", "parallel.cp_method=ulysses", "parallel.sequence_parallel=true"),
        slow("parallel=tp", "dp=2", "dp_shard=2", "parallel.sequence_parallel=true", "memory.micro_batch=4"),
    ],
    ids=" ".join,
)
def test_products_of_layouts_give_the_one_rank_run(layout: list[str], one_rank: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "run", *layout)
    for name, tolerance in {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 1e-4}.items():
        assert column(tmp_path / "run", name) == pytest.approx(column(one_rank, name), rel=tolerance), name


def test_three_ranks_with_dropout_off_and_an_odd_batch(tmp_path: Path) -> None:
    run_training(tmp_path / "one", "batch.tokens=480")
    run_training(tmp_path / "three", "batch.tokens=480", "dp=3", "memory.micro_batch=1")
    for name, tolerance in {"loss": 1e-5, "eval_loss": 1e-5, "grad_norm": 1e-4}.items():
        assert column(tmp_path / "three", name) == pytest.approx(column(tmp_path / "one", name), rel=tolerance), name


def test_dropout_follows_from_the_seed_and_differs_between_ranks(one_rank: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "a", "dp=2", "tp=2", "model.dropout=0.3")
    run_training(tmp_path / "b", "dp=2", "tp=2", "model.dropout=0.3")
    assert column(tmp_path / "a", "loss") == column(tmp_path / "b", "loss")
    assert column(tmp_path / "a", "loss") != pytest.approx(column(one_rank, "loss"), rel=1e-5)
    seeds = {_dropout_seed(0, tokens, part) for tokens in (0, 512) for part in (0, 1)} | {_dropout_seed(1, 0, 0)}
    assert len(seeds) == 5  # each step, rank and seed drops others


def test_bf16_stays_within_a_percent(one_rank: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "run", "precision=bf16")
    assert column(tmp_path / "run", "loss") == pytest.approx(column(one_rank, "loss"), rel=1e-2)
    assert column(tmp_path / "run", "loss") != column(one_rank, "loss")


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def test_torchrun_is_joined(one_rank: Path, tmp_path: Path) -> None:
    run_training(tmp_path / "run", before=(*TORCHRUN, "--nproc-per-node", "2"))
    assert column(tmp_path / "run", "loss") == pytest.approx(column(one_rank, "loss"), rel=1e-5)


def test_torchrun_on_two_nodes(one_rank: Path, tmp_path: Path) -> None:
    port = 20_000 + os.getpid() % 20_000
    nodes = [
        start_training(
            tmp_path / "run",
            before=(*TORCHRUN, *f"--nnodes 2 --node-rank {node} --nproc-per-node 1".split(), f"--master-port={port}"),
        )
        for node in (0, 1)
    ]
    assert [(node.communicate(timeout=120), node.returncode)[1] for node in nodes] == [0, 0]
    assert column(tmp_path / "run", "loss") == pytest.approx(column(one_rank, "loss"), rel=1e-5)


def test_srun_is_joined(one_rank: Path, tmp_path: Path) -> None:
    step = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    tasks = [
        start_training(tmp_path / "run", env={**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in ("0", "1")
    ]
    assert [(task.communicate(timeout=120), task.returncode)[1] for task in tasks] == [0, 0]
    assert column(tmp_path / "run", "loss") == pytest.approx(column(one_rank, "loss"), rel=1e-5)


def test_a_bad_configuration_under_torchrun_is_told_once(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "dp=4", before=(*TORCHRUN, "--nproc-per-node", "2"), code=1)
    assert done.stderr.count("error: the layout (dp=4, 4 ranks) does not fit the 2 ranks") == 1
    assert "exitcode  : 2" in done.stderr


def test_data_shorter_than_a_batch(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "dp=2", "data.tokens=1024", "batch.tokens=640", code=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert re.search(r"the data hold \d+ training tokens, less than one batch of batch.tokens=640", errors[0])


def test_a_missing_file_is_told_once_by_all_ranks(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "dp=2", "data=files", "data.path=nowhere/*.txt", code=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "nowhere/*.txt" in errors[0]


@pytest.mark.parametrize(
    "layout",
    [["dp=2"], ["pp=2"], slow("tp=2", "parallel.sequence_parallel=true"), slow("cp=2")],
    ids=" ".join,
)
def test_real_text_on_two_ranks(layout: list[str], tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number} bottles of beer on the wall, take one down. " * 20)
    text = ["data=files", f"data.path={tmp_path}/texts", f"data.cache_dir={tmp_path}/cache", "model.vocab_size=300"]
    run_training(tmp_path / "one", *text, "train.sample_tokens=5")
    done = run_training(tmp_path / "two", *text, "train.sample_tokens=5", *layout)
    assert column(tmp_path / "two", "loss") == pytest.approx(column(tmp_path / "one", "loss"), rel=1e-5)
    assert column(tmp_path / "two", "eval_loss") == pytest.approx(column(tmp_path / "one", "eval_loss"), rel=1e-5)
    assert (tmp_path / "two/sample.txt").read_text() == (tmp_path / "one/sample.txt").read_text()
    assert "bits per byte" in done.stdout


def test_a_folder_that_holds_a_run_is_refused(one_rank: Path) -> None:
    done = run_training(one_rank, code=2)
    assert done.stderr.splitlines() == [
        f"error: hydra.run.dir={one_rank} holds a run already; valid: a folder without a config.yaml"
    ]


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_a_folder_that_cannot_be_made_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run_training(tmp_path / name, code=2, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "file" in line


def test_an_evaluation_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "train.steps=2", "optim.weight_decay=1e30", code=1)
    assert "the eval_loss of step 2 is nan" in done.stderr


def test_the_loss_going_to_infinity_ends_the_run(tmp_path: Path) -> None:
    done = run_training(
        tmp_path / "run",
        "lr.peak=1e30",
        "lr.final=1e30",
        "train.steps=50",
        "train.clip=inf",
        "train.eval_every=0",
        code=1,
    )
    assert "rank 0 failed:" in done.stderr
    assert re.search(r"the loss of step \d+ is (nan|inf)", done.stderr)
    assert column(tmp_path / "run", "loss")[-1] is None  # valid JSON all the same


def test_an_unreachable_wandb_changes_nothing(one_rank: Path, tmp_path: Path) -> None:
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    began = time.monotonic()
    run_training(tmp_path / "run", "logger=wandb", env=nobody)
    assert time.monotonic() - began < 60
    assert column(tmp_path / "run", "loss") == column(one_rank, "loss")


def test_wandb_offline_is_the_default_and_holds_the_metrics(tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}  # nobody has logged in there
    run_training(tmp_path / "run", "logger=wandb", env=env)
    (recorded,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    content = recorded.read_bytes()
    for name in (b"eval_loss", b"grad_norm", b"tokens_per_second"):
        assert name in content


def test_two_runs_started_together_have_a_folder_each(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), *TINY]
    both = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=120)[0] for process in both]
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert column(folder, "step") == [1, 2, 2, 3, 4, 4]
        assert sum(f"results in runs/{folder.name}" in out.splitlines() for out in printed) == 1


def test_multirun_gives_each_job_its_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "-m", *TINY, "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert column(tmp_path / "sweep/0", "loss") != column(tmp_path / "sweep/1", "loss")


def test_a_text_sample_ends_the_run(tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "train.sample_tokens=5")
    assert "a sample" in done.stdout
    assert (tmp_path / "run/sample.txt").read_text().strip()


def test_a_model_with_more_rows_than_the_tokenizer_has_entries_writes_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    text = ["data=files", f"data.path={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/cache", "data.tokenizer=bytes"]
    run_training(tmp_path / "run", *text, "model.vocab_size=4000", "train.sample_tokens=50")
    assert (tmp_path / "run/sample.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "layout",
    [
        ["dp=2", "cp=2", "memory.ckpt=full"],
        slow("pp=2", "memory.micro_batch=4", "memory.ckpt=selective", "memory.offload=[activations]"),
        slow("tp=2", "dp=2", "dp_shard=2", "parallel.sequence_parallel=true"),
    ],
    ids=" ".join,
)
def test_compiled_blocks_give_the_same_losses(layout: list[str], one_rank: Path, tmp_path: Path) -> None:
    done = run_training(tmp_path / "run", "compile=true", *layout, env={"TORCH_LOGS": "graph_code"})
    assert "TRACED GRAPH" in done.stderr
    assert column(tmp_path / "run", "loss") == pytest.approx(column(one_rank, "loss"), rel=1e-5)


def test_the_first_five_steps_say_where_memory_goes(tmp_path: Path) -> None:
    settings = ["train.steps=7", "train.eval_every=0", "train.footprint_steps=5"]
    run_training(tmp_path / "run", *settings, "memory=[ckpt,offload,accum]", "dp=2")
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert [line["memory"] is None for line in lines] == [False] * 5 + [True] * 2
    size = 4 * num_parameters(make_tiny_job().config.model)
    held = lines[1]["memory"]["phases"]
    assert held["optimizer"]["parameters"] == held["optimizer"]["gradients"] == size
    assert 0 < held["optimizer"]["host"] - 4 * size < 1000  # weights, gradients, two moments; and counts of steps
    assert held["optimizer"]["optimizer"] == 0
    assert held["forward"]["activations"] > 0
    assert (tmp_path / "run/footprint.png").read_bytes().startswith(b"\x89PNG")


def test_measuring_the_noise_scale_takes_the_memory_of_one_more_gradient(tmp_path: Path) -> None:
    settings = ["train.steps=4", "train.eval_every=0", "train.footprint_steps=4", "train.timeline_step=0"]
    run_training(tmp_path / "run", *settings, "noise.every=2", "memory.micro_batch=4")
    memory = [line["memory"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    size = 4 * num_parameters(make_tiny_job().config.model)
    assert [each["phases"]["backward"]["gradients"] for each in memory[2:]] == [size, 2 * size]
    peaks = [sum(num_bytes for kind, num_bytes in each.items() if kind != "phases") for each in memory[2:]]
    assert peaks[1] - peaks[0] <= size + 2 * 512 * 8  # and of the step's tokens and targets, in another order
