"""From a composed configuration to a job that is known to run, all without torch: a wrong key answers in a second."""

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from memory.config import check_offload, check_selective
from memory.micro_batch import BatchShape, micro_batches_of_halves, split_batch
from models.flops import head_layers, num_parameters
from parallelism.layout import (
    Layout,
    ParallelConfig,
    check_cuda_pieces,
    check_gpus,
    check_host_memory,
    check_local_ranks,
    check_model,
    check_seq_len,
    check_world_size,
    idle_settings,
    resolve_layout,
)
from parallelism.ranks import available_bytes, joined, num_gpus
from parallelism.schedules import SCHEDULES
from parallelism.stages import check_micro_batches, check_split_backward, multiple_of, resolve_stages
from training.batch import Budget, doublings, make_budget, resolve_lr, scale_down
from training.config import Config
from training.schedule import LearningRate, Stage

BF16_WIDTH = 256  # on a CPU, narrower models gain little from bf16: casting costs what the matmuls save


@dataclass(frozen=True)
class Job:
    """Everything a rank has to know, decided before any rank starts."""

    config: Config  # with every auto that is known here filled in
    layout: Layout
    device: str  # cpu or cuda
    precision: str  # fp32 or bf16
    budget: Budget
    shapes: dict[tuple[int, int], BatchShape]  # of every stage that the run can come to, by its tokens and seq_len
    lr: LearningRate
    notices: list[str]  # what was rounded, and settings that do nothing on this layout, in words

    def shape_of(self, stage: Stage) -> BatchShape:
        """How a step of this stage is cut."""
        return self.shapes[stage.tokens, stage.seq_len]

    @property
    def first_shape(self) -> BatchShape:
        """That of the first step."""
        return self.shape_of(self.budget.batch.stages[0])


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
    device, layout = resolve_ranks(config, planning)
    model, memory = config.model, config.memory
    check_model(
        layout,
        config.parallel,
        heads=model.heads,
        hidden_dim=model.hidden_dim,
        vocab_size=model.vocab_size,
        dropout=model.dropout,
    )
    parallel = resolve_stages(config.parallel, layout, layers=model.layers, head_layers=head_layers(model))
    check_split_backward(layout, parallel, compile=config.compile, ckpt=memory.ckpt)
    check_offload(memory.offload, layout.dp_shard)
    ring = layout.cp > 1 and parallel.cp_method == "ring"
    check_selective(memory.ckpt, compile=config.compile, ring=ring)
    precision = resolve_precision(config.precision, device, model.dim)
    if device == "cuda":
        check_cuda_pieces(layout, parallel, precision=precision, head_dim=model.head_dim)

    config, rounded = scale_down(config, partial(runnable_step, layout, parallel, memory.micro_batch))
    budget = make_budget(config)
    shapes = cut_stages(config, layout, parallel, budget)
    lr, lr_keys = resolve_lr(config, budget)
    sizes = {shape.micro_batch for shape in shapes.values()}
    settled = replace(
        config,
        dp=layout.dp,
        dp_shard=layout.dp_shard,
        device=device,
        precision=precision,
        parallel=parallel,
        memory=replace(memory, micro_batch=sizes.pop() if len(sizes) == 1 else memory.micro_batch),
        lr=replace(config.lr, **lr_keys),
    )
    missed = unmeasured(config, layout, parallel, shapes)
    if config.batch.double_to and missed:
        raise ValueError(
            f"batch.double_to={config.batch.double_to} needs the noise scale, and {missed[0]}; valid: batch.tokens=N "
            "with two sequences a rank or more, or batch=constant"
        )
    notices = [*rounded, *idle_keys(config, layout, device), *missed]
    return Job(settled, layout, device, precision, budget, shapes, lr, notices)


def resolve_ranks(config: Config, planning: bool) -> tuple[str, Layout]:
    """The device and the layout. ValueError: this machine, or those who started the ranks, don't have them."""
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
    return device, layout


def idle_keys(config: Config, layout: Layout, device: str) -> list[str]:
    """Settings that do nothing, in words."""
    words = idle_settings(layout, config.parallel, config.dp_shard)
    if {"optimizer", "params"} <= set(config.memory.offload):
        words.append("memory.offload: params are updated where they lie, so optimizer adds nothing")
    if config.train.memory_profile and device == "cpu":
        words.append("train.memory_profile=true does nothing on a CPU; footprint.png is drawn there too")
    return words


def unmeasured(
    config: Config, layout: Layout, parallel: ParallelConfig, shapes: dict[tuple[int, int], BatchShape]
) -> list[str]:
    """Which batches the noise scale can't be measured with, since a rank's sequences have no halves; in words."""
    words, multiple = [], multiple_of(layout, parallel) if layout.pp > 1 else None
    for shape in shapes.values():
        own = shape.num_sequences // layout.dp
        if config.noise.every and micro_batches_of_halves(own, shape.micro_batch, multiple) is None:
            into = f" in a multiple of {multiple} micro-batches" if multiple and multiple > 1 else ""
            words.append(
                f"noise.every={config.noise.every} measures nothing in steps of {shape.tokens:,} tokens: of a rank's "
                f"sequences, {own}, there are no halves{into}"
            )
    return words


def filling_multiple(layout: Layout, parallel: ParallelConfig) -> int:
    """A number of micro-batches that fills a pipeline; multiples of it do so best."""
    return layout.pp * (2 if layout.pp > 1 and SCHEDULES[parallel.pp_schedule].v_shaped else 1)


def runnable_step(layout: Layout, parallel: ParallelConfig, micro_batch: int | str, seq_len: int) -> int:
    """Tokens of which a step can be any multiple, and a pipeline is filled."""
    sequences = layout.dp * filling_multiple(layout, parallel) * (1 if isinstance(micro_batch, str) else micro_batch)
    return sequences * seq_len


def cut_stages(
    config: Config, layout: Layout, parallel: ParallelConfig, budget: Budget
) -> dict[tuple[int, int], BatchShape]:
    """How each stage that the run reaches cuts its steps, by their tokens and seq_len. ValueError: one can't run."""
    shapes = {}
    for number, stage in enumerate(budget.stages):
        section = f"batch.stages.{number}" if config.batch.stages else "batch"
        context = config.model.context
        if stage.seq_len > context:
            raise ValueError(
                f"{section}.seq_len={stage.seq_len} is longer than model.context={context}; "
                f"valid: {section}.seq_len <= {context}"
            )
        check_seq_len(layout, parallel, stage.seq_len, section)
        for tokens in (stage.tokens, *doublings(stage.tokens, config.batch.double_to or 0)):
            shape = split_batch(
                tokens=tokens,
                seq_len=stage.seq_len,
                micro_batch=config.memory.micro_batch,
                num_parts=layout.dp,
                shard=layout.dp_shard,
                rounds=filling_multiple(layout, parallel),
                section=section,
            )
            per_rank, of = shape.num_sequences // layout.dp, f" of {section}.tokens={tokens}"
            check_micro_batches(layout, parallel, per_rank=per_rank, micro_batch=shape.micro_batch, of=of)
            shapes[tokens, stage.seq_len] = shape
    return shapes


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
