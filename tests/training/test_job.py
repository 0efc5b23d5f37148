"""What a command line comes to, and which ones are refused: all before torch is imported."""

import re
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.cli import ROOT, make_tiny_job
from training.config import Config
from training.errors import explain
from training.job import make_job


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.layer=3", "there is no key model.layer; did you mean model.layers?"),
        ("+model.layer=3", "there is no key model.layer; did you mean model.layers?"),
        ("+typo=1", "there is no key typo"),
        ("sead=1", "there is no key sead; did you mean seed?"),
        ("tokens=1", "there is no key tokens; did you mean"),
        ("model=gtp2", "model=gtp2 does not exist; valid:"),
        ("model=gtp2", "did you mean gpt2?"),
        ("memory=[acum]", "memory=acum does not exist; valid: accum, ckpt, offload; did you mean accum?"),
        ("model.layers=many", "model.layers=many has the wrong type; valid: a whole number"),
        ("model.layers=1.5", "model.layers=1.5 has the wrong type; valid: a whole number"),
        ("model.layers=null", "model.layers=None has the wrong type"),
        ("compile=perhaps", "compile=perhaps has the wrong type; valid: true or false"),
        ("dp=1.5", "dp=1.5 has the wrong type; valid: a whole number or a word"),
        ("optim.betas=[a,b]", "optim.betas[0]=a has the wrong type; valid: a list of a number"),
        ("train=3", "train has the wrong type; valid: one of its keys, such as train.steps=VALUE"),
        ("batch=big", "batch=big does not exist; valid: constant"),
        ("~seed", "seed has no value; valid: a whole number"),
        ("model.layers==3", "model.layers==3"),
        ("model.layers", "model.layers"),
        ("train.steps=0", "train.steps=0 must be at least 1, and finite"),
        ("train.steps=null", "train.steps=None and train.tokens=None: exactly one"),
        ("train.tokens=512", "train.steps=4 and train.tokens=512: exactly one"),
        ("train.clip=0", "train.clip=0.0 must be above 0"),
        ("train.clip=nan", "train.clip=nan must be above 0"),
        ("lr.shape=cosin", "lr.shape=cosin is not one of cosine, wsd, linear, constant; did you mean cosine?"),
        ("lr.final=1", "lr.final=1.0 is above lr.peak=0.003"),
        ("lr.peak=nan", "lr.peak=nan must be at least 0, and finite"),
        ("lr.warmup_tokens=1e9", "lr.warmup_tokens=1000000000 are more than the 2048 tokens of the run"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] must be two numbers in [0, 1)"),
        ("device=gpu", "device=gpu is not one of auto, cpu, cuda"),
        ("precision=fp16", "precision=fp16 is not one of auto, fp32, bf16"),
        ("seed=-1", "seed=-1 must be in [0, 2**63)"),
        ("logger.mode=of", "logger.mode=of is not one of auto, online, offline"),
        ("batch.seq_len=64", "batch.seq_len=64 is longer than model.context=32; valid: batch.seq_len <= 32"),
        ("batch.tokens=500", "does not divide by batch.seq_len=32 * dp=1 = 32; nearest valid: batch.tokens=480 or 512"),
        ("dp=32", "* dp=32 = 1024; nearest valid: batch.tokens=1024, or dp=16"),
        ("tp=3", "tp=3 does not divide model.heads=4; nearest valid: tp=2 or 4"),
        ("parallel=tpp", "parallel=tpp does not exist; valid: cp, dp, fsdp, hsdp, nd, pp, tp; did you mean tp?"),
        ("dp_shard=2", "dp_shard=2 does not divide dp=1; nearest valid: dp_shard=1, or dp=2"),
        ("fsdp=2", "there is no key fsdp; did you mean parallel=fsdp?"),
        ("parallel.sequence_paralel=true", "did you mean parallel.sequence_parallel?"),
        ("parallel.reshard=never", "parallel.reshard=never has the wrong type; valid: true or false"),
        ("dp=3", "batch.tokens=512 does not divide by batch.seq_len=32 * dp=3 = 96; nearest valid: batch.tokens=480"),
        ("memory.micro_batch=5", "= 160; nearest valid: memory.micro_batch=4 or 8, or batch.tokens=480 or 640"),
        (
            "memory.ckpt=fulll",
            "fulll is not one of none, full, sqrt, sqrt_deep, selective; did you mean full?",
        ),
        ("memory.offload=[optimiser]", "may list optimizer, params, activations; did you mean optimizer?"),
        (
            "memory.offload=optimizer",
            "has the wrong type; valid: a list of a word, in brackets: memory.offload=[...]",
        ),
        (
            "memory.offload=[params,optimizer]",
            "memory.offload=[params,optimizer] with dp_shard=1: params are offloaded where they are sharded; "
            "valid: parallel=fsdp dp=2 or more, or memory.offload=[optimizer]",
        ),
        ("train.memory_profile=perhaps", "train.memory_profile=perhaps has the wrong type; valid: true or false"),
        ("ep=2", "ep=2 is not built yet; valid: ep=1"),
        ("pp=3", "pp=3 * parallel.pp_virtual=1 are more stages than model.layers=2; nearest valid: pp=2"),
    ],
)
def test_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises((ValueError, HydraException, OmegaConfBaseException)) as error:
        make_tiny_job(override)
    line = explain(error.value)
    assert message in line
    assert "\n" not in line


def test_a_number_for_a_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "batch=3"])
    with pytest.raises(ValueError, match="group") as error:
        make_tiny_job("batch=3")
    assert explain(error.value) == "batch=3 does not exist; valid: constant, llama3, noise_scale, ramp"


def test_a_misspelt_key_answers_within_three_seconds_and_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), "model.layer=3"]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert time.monotonic() - began < 3
    assert done.returncode == 2
    assert not re.search(r"\|\s+torch$", done.stderr, re.MULTILINE)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert errors == ["error: there is no key model.layer; did you mean model.layers?"]
    assert not list(tmp_path.iterdir())


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.job.num_gpus", lambda: 0)
    with pytest.raises(ValueError, match="device=cuda but this machine has no GPU"):
        make_tiny_job("device=cuda")
    assert make_tiny_job("device=auto").device == "cpu"


def test_gpus_are_taken_by_auto_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.job.num_gpus", lambda: 4)
    job = make_tiny_job("device=auto")
    assert (job.device, job.layout.dp) == ("cuda", 4)
    with pytest.raises(ValueError, match=r"needs 8 GPUs and this node has 4; .* 2 nodes"):
        make_tiny_job("device=auto", "dp=8")
    assert make_tiny_job("device=cpu", "dp=8").device == "cpu"


def test_world_size_of_torchrun_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert make_tiny_job().layout.dp == 2
    with pytest.raises(ValueError, match=r"dp=4, 4 ranks.* 2 ranks that torchrun has started; valid: dp=2 or dp=auto"):
        make_tiny_job("dp=4")


def test_more_ranks_than_gpus_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.job.num_gpus", lambda: 2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun has started 4 ranks on this node, which has 2 GPUs; valid: 2 ranks"):
        make_tiny_job("device=auto")
    assert make_tiny_job("device=cpu").layout.dp == 4


def test_every_auto_is_filled_in_where_it_is_written_down() -> None:
    config = make_tiny_job("precision=auto", "device=cpu", "dp=auto", "train.steps=100").config
    settled = (config.dp, config.precision, config.memory.micro_batch, config.lr.warmup_tokens, config.lr.decay_tokens)
    assert settled == (1, "fp32", 16, 100 * 512 // 20, 100 * 512 // 5)


def test_memory_presets_stack() -> None:
    for override in ("memory=accum", "memory=[accum]"):
        assert make_tiny_job(override).first_shape.micro_batch == 1
    memory = make_tiny_job("memory=[ckpt,offload,accum]").config.memory
    assert (memory.ckpt, memory.offload, memory.micro_batch) == ("full", ["optimizer"], 1)


def test_selective_is_not_compiled_around_a_ring() -> None:
    with pytest.raises(ValueError, match=r"memory.ckpt=selective can't be had with .*; valid: memory.ckpt=full"):
        make_tiny_job("cp=2", "compile=true", "memory.ckpt=selective")
    make_tiny_job("cp=2", "compile=true", "memory.ckpt=full")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["memory=ckpt", "parallel.pp_schedule=zb_h1"], "memory.ckpt=full can't .* or parallel.pp_schedule=1f1b"),
        (["memory=ckpt", "parallel.pp_schedule=zbv"], "none or parallel.pp_schedule=interleaved_1f1b"),
        (["compile=true", "parallel.pp_schedule=zb_h1"], "compile=true can't be had with .*; valid: compile=false"),
    ],
    ids=str,
)
def test_halved_backwards_are_not_recomputed_or_compiled(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_job("pp=2", "model.layers=4", *overrides)
    make_tiny_job("model.layers=4", *overrides)  # without a pipeline a schedule does nothing


def test_tokens_give_the_steps_and_whole_floats_are_numbers_of_tokens() -> None:
    job = make_tiny_job("train.steps=null", "train.tokens=1e4")
    assert job.budget.num_steps == 20  # 10,000 tokens in steps of 512, the last one past the budget
    assert job.lr.end == 10_000


def test_precision_is_bf16_only_where_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.job.cpu_has_bf16", lambda: True)
    assert make_tiny_job("precision=auto").precision == "fp32"
    assert make_tiny_job("precision=auto", "model.dim=256").precision == "bf16"
    monkeypatch.setattr("training.job.cpu_has_bf16", lambda: False)
    assert make_tiny_job("precision=auto", "model.dim=256").precision == "fp32"


def test_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"compile=true on a CPU needs a C\+\+ compiler"):
        make_tiny_job("compile=true")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf").glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}"
)
def test_every_file_of_conf_composes(path: Path) -> None:
    group = path.parent.name
    needs = {"files": ["data.path=x"], "hf": ["data.name=x"]}.get(path.stem, [])
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert (
            make_job(
                compose("config", [f"{group}={path.stem}", *needs, "device=cpu"]), planning=True
            ).budget.total_tokens
            >= 1
        )


def test_every_group_has_a_base_that_lists_all_its_keys() -> None:
    for group, kind in get_type_hints(Config).items():
        base = ROOT / "conf" / group / "base.yaml"
        if is_dataclass(kind) and group not in ("train", "noise"):  # they stand in config.yaml
            listed = OmegaConf.load(base)
            if group == "parallel":  # its file also has the degrees, which stand at the top level
                listed = listed.parallel
            assert sorted(map(str, listed)) == sorted(field.name for field in fields(kind)), base
    groups = [folder for folder in (ROOT / "conf").iterdir() if folder.is_dir() and folder.name != "experiment"]
    assert all((folder / "base.yaml").exists() for folder in groups)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel=fsdp"], ["shards nothing at dp=1"]),
        (["parallel.sequence_parallel=true"], ["does nothing at tp=1"]),
        (["train.memory_profile=true"], ["does nothing on a CPU"]),
        (["parallel.reshard=false", "dp=2"], ["does nothing at dp_shard=1"]),
        (["parallel=fsdp", "dp=2", "parallel.reshard=false", "tp=2", "parallel.sequence_parallel=true"], []),
    ],
    ids=str,
)
def test_settings_that_do_nothing_are_told(overrides: list[str], words: list[str]) -> None:
    idle = make_tiny_job(*overrides).notices
    assert len(idle) == len(words)
    assert all(some in line for some, line in zip(words, idle))


def test_auto_gives_v_shaped_schedules_twice_as_many_micro_batches() -> None:
    assert make_tiny_job("pp=2").first_shape.num_micro_batches == 2
    assert make_tiny_job("pp=2", "model.layers=4", "parallel.pp_schedule=zbv").first_shape.num_micro_batches == 4
