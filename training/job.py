"""From a composed configuration to a job that is known to run, all without torch: a wrong key answers in a second."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from memory.config import check_offload, check_selective
from memory.micro_batch import BatchShape, split_batch
from models.flops import head_layers, num_parameters
from parallelism.layout import (
    Layout,
    check_cuda_pieces,
    check_gpus,
    check_host_memory,
    check_local_ranks,
    check_model,
    check_world_size,
    idle_settings,
    resolve_layout,
)
from parallelism.ranks import available_bytes, joined, num_gpus
from parallelism.schedules import SCHEDULES
from parallelism.stages import check_halves, check_micro_batches, resolve_stages
from training.config import Config
from training.schedule import LearningRate

BF16_WIDTH = 256  # on a CPU, narrower models gain little from bf16: casting costs what the matmuls save


@dataclass(frozen=True)
class Job:
    """Everything a rank has to know, decided before any rank starts."""

    config: Config  # with every auto that is known here filled in
    layout: Layout
    device: str  # cpu or cuda
    precision: str  # fp32 or bf16
    batch: BatchShape
    steps: int
    lr: LearningRate
    idle: list[str]  # settings that do nothing on this layout, in words


def make_job(cfg: DictConfig, planning: bool = False) -> Job:
    """Types the configuration and fills in every `auto`. ValueError, or an omegaconf error: it could not run.

    `planning`: it need not run here, whatever this machine has.
    """
    return settle(typed(cfg), planning)


def typed(cfg: DictConfig) -> Config:
    """The configuration as dataclasses; after this no DictConfig exists."""
    plain = _whole_numbers(OmegaConf.to_container(cfg, resolve=True))
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    assert isinstance(config, Config)
    return config


def settle(config: Config, planning: bool = False) -> Job:
    """Layout, device, precision and batch arithmetic of a typed configuration. ValueError: they can't be."""
    ranks = joined()
    gpus = num_gpus() if config.device != "cpu" else 0
    device = config.device if config.device != "auto" else ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        raise ValueError("device=cuda but this machine has no GPU that torch can use; valid: device=cpu, device=auto")
    layout = resolve_layout(
        dp=config.dp,
        dp_shard=config.dp_shard,
        tp=config.tp,
        pp=config.pp,
        cp=config.cp,
        ep=config.ep,
        num_devices=ranks.world_size if ranks else max(gpus, 1),
    )
    if ranks:
        check_world_size(layout, ranks.world_size, ranks.started_by)
        if device == "cuda":
            check_local_ranks(ranks.local_world_size, gpus, ranks.started_by)
    elif device == "cpu" and not planning:
        check_host_memory(layout, num_parameters(config.model), config.memory.offload, available_bytes())
    elif device == "cuda":
        per_node = config.cluster.devices_per_node
        check_gpus(layout, gpus, gpus if isinstance(per_node, str) else per_node)
    if config.compile and device == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise ValueError("compile=true on a CPU needs a C++ compiler (g++, or what CXX names); valid: compile=false")
    if config.batch.seq_len > config.model.context:
        raise ValueError(
            f"batch.seq_len={config.batch.seq_len} is longer than model.context={config.model.context}; "
            f"valid: batch.seq_len <= {config.model.context}"
        )
    check_model(
        layout,
        config.parallel,
        heads=config.model.heads,
        hidden_dim=config.model.hidden_dim,
        vocab_size=config.model.vocab_size,
        seq_len=config.batch.seq_len,
        dropout=config.model.dropout,
    )
    parallel = resolve_stages(
        config.parallel, layout, layers=config.model.layers, head_layers=head_layers(config.model)
    )
    batch = split_batch(
        tokens=config.batch.tokens,
        seq_len=config.batch.seq_len,
        micro_batch=config.memory.micro_batch,
        num_parts=layout.dp,
        shard=layout.dp_shard,
        rounds=layout.pp * (2 if SCHEDULES[parallel.pp_schedule].v_shaped else 1),
    )
    check_micro_batches(layout, parallel, per_rank=batch.num_sequences // layout.dp, micro_batch=batch.micro_batch)
    check_halves(layout, parallel, compile=config.compile, ckpt=config.memory.ckpt)
    check_offload(config.memory.offload, layout.dp_shard)
    ring = layout.cp > 1 and parallel.cp_method == "ring"
    check_selective(config.memory.ckpt, compile=config.compile, ring=ring)
    precision = resolve_precision(config.precision, device, config.model.dim)
    if device == "cuda":
        check_cuda_pieces(layout, parallel, precision=precision, head_dim=config.model.head_dim)
    steps = config.train.steps or -(-(config.train.tokens or 0) // batch.tokens)
    lr = resolve_lr(config, total_tokens=steps * batch.tokens)
    settled = replace(
        config,
        dp=layout.dp,
        dp_shard=layout.dp_shard,
        device=device,
        precision=precision,
        parallel=parallel,
        memory=replace(config.memory, micro_batch=batch.micro_batch),
        lr=replace(config.lr, warmup_tokens=lr.warmup_tokens, decay_tokens=lr.decay_tokens),
    )
    idle = idle_settings(layout, config.parallel, config.dp_shard)
    if {"optimizer", "params"} <= set(config.memory.offload):
        idle.append("memory.offload: params are updated where they lie, so optimizer adds nothing")
    if config.train.memory_profile and device == "cpu":
        idle.append("train.memory_profile=true does nothing on a CPU; footprint.png is drawn there too")
    return Job(settled, layout, device, precision, batch, steps, lr, idle)


def resolve_lr(config: Config, total_tokens: int) -> LearningRate:
    """The learning rate's lengths in tokens, each `auto` filled in. ValueError: they overrun the run."""
    lr = config.lr
    warmup = total_tokens // 20 if isinstance(lr.warmup_tokens, str) else lr.warmup_tokens
    decay = total_tokens // 5 if isinstance(lr.decay_tokens, str) else lr.decay_tokens
    if warmup + (decay if lr.shape == "wsd" else 0) > total_tokens:
        decays = f" and lr.decay_tokens={decay}" if lr.shape == "wsd" else ""
        raise ValueError(f"lr.warmup_tokens={warmup}{decays} are more than the {total_tokens} tokens of the run")
    return LearningRate(lr.shape, lr.peak, lr.final, warmup, decay, total_tokens)


def resolve_precision(precision: str, device: str, dim: int) -> str:
    """`auto` is bf16 where it gains: on GPUs that have it, and on CPUs with bf16 units for models wide enough."""
    if precision != "auto":
        return precision
    if device == "cuda":
        return "bf16" if gpu_has_bf16() else "fp32"
    return "bf16" if dim >= BF16_WIDTH and cpu_has_bf16() else "fp32"


def gpu_has_bf16() -> bool:
    """Whether every GPU is of compute capability 8.0 or above; yes where no nvidia-smi tells.

    Torch is not asked: its answer makes a CUDA context, and this process is about to fork the ranks.
    """
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True) if shutil.which(query[0]) else None
    if answer is None or answer.returncode != 0:
        return True
    return all(float(line) >= 8.0 for line in answer.stdout.split())


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX512-BF16 or AMX), where the operating system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split("flags", 1)[-1].split("\n", 1)[0].split() if cpuinfo.exists() else []
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _whole_numbers(value: Any) -> Any:
    """Lets 1e6 be a number of tokens: YAML reads it as a float, and a float field takes an int as well."""
    if isinstance(value, dict):
        return {key: _whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
