"""The n-dimensional layout: the one place that knows in which order layouts are applied, and the only path to them.

`parallel=dp` is this with one degree above 1.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from memory.offload_activations import offload_activations
from memory.recompute import apply_recompute
from models.gpt import GPT
from parallelism.cp import apply_cp
from parallelism.distributed_model import DistributedModel
from parallelism.dp import apply_dp
from parallelism.fsdp import apply_fsdp
from parallelism.layout import Layout, ParallelConfig
from parallelism.materialise import materialise
from parallelism.mesh import Mesh
from parallelism.pp import cut_stage
from parallelism.schedules import SCHEDULES
from parallelism.slots import stages_of
from parallelism.tp import apply_tp


def parallelize(
    model: GPT,
    mesh: Mesh,
    device: torch.device,
    parallel: ParallelConfig,
    *,
    seed: int,
    precision: str = "fp32",
    compile: bool = False,
    ckpt: str = "none",
    offload: Collection[str] = (),
) -> DistributedModel:
    """Lays the model out over the mesh and fills it with its initial weights: the order is in the body.

    The model is on the meta device: no rank ever holds more of it than its shards and, while they are filled, one whole
    parameter. precision: fp32, or bf16 for bf16 matmuls on fp32 weights; under FSDP the residual stream is bf16 too,
    since its parameters are gathered so. ckpt and offload: as in memory/config.py.
    """
    layout, weights = mesh.layout, mesh.weights
    replicas = weights["replicas"].size()
    # DDP can't hold tp's parameters, which are DTensors, and doesn't see a backward in two halves. There, plain data
    # parallel is FSDP with a shard of one: DDP's traffic, but parameters are copied before use, and gradients before
    # they are reduced.
    split = layout.pp > 1 and SCHEDULES[parallel.pp_schedule].splits_backward
    sharded = layout.dp_shard > 1 or (replicas > 1 and (layout.tp > 1 or split))
    # A pipeline keeps gathered parameters (torch's runtime those of three stages at a time): it would need them anew
    # for each micro-batch.
    reshard = parallel.reshard and layout.pp == 1
    bf16 = precision == "bf16"
    stages: dict[int, GPT] = {}
    trained: dict[int, nn.Module] = {}
    replicated: dict[nn.Parameter, float] = {}
    for number, stage in own_stages(model, layout, parallel).items():
        partial: dict[str, bool] = {}
        if layout.tp > 1:
            partial = apply_tp(stage, weights["tp"], sequence_parallel=parallel.sequence_parallel)
        if layout.cp > 1:
            apply_cp(stage, mesh.cp, method=parallel.cp_method)
        apply_recompute(stage, ckpt)
        if "activations" in offload:
            offload_activations(stage, device)
        if compile:
            for block in stage.blocks.values():
                block.compile()
        if sharded:
            axes = weights["shard"] if replicas == 1 else weights["replicas", "shard"]
            apply_fsdp(stage, axes, reshard=reshard, bf16=bf16, offload="params" in offload)
        materialise(stage, torch.device("cpu") if "params" in offload else device, seed)
        stages[number] = stage
        trained[number] = apply_dp(stage, weights["replicas"]) if replicas > 1 and not sharded else stage
        for name, parameter in stage.named_parameters():
            # A gradient that all ranks of tp have is no longer bitwise the same on each once data parallel ranks have
            # added it up, in an order that follows from their buffers' sizes. Lest copies drift apart it is averaged.
            if partial.get(name) or (name in partial and layout.dp * layout.cp > 1):
                replicated[parameter] = 1 if partial[name] else 1 / layout.tp
    hidden_dtype = torch.bfloat16 if bf16 and sharded else next(model.parameters()).dtype
    return DistributedModel(stages, trained, mesh, device, parallel, replicated, bf16, hidden_dtype)


def own_stages(model: GPT, layout: Layout, parallel: ParallelConfig) -> dict[int, GPT]:
    """The pipeline stages of this rank, by number; without pp the whole model is the only one."""
    if layout.pp == 1:
        return {0: model}
    v_shaped = SCHEDULES[parallel.pp_schedule].v_shaped
    rank = layout.place(dist.get_rank())["pp"]
    own = stages_of(rank, layout.pp, parallel.stages_per_rank, v_shaped)
    return {stage: cut_stage(model, parallel.pp_split, stage) for stage in own}
