"""Sharded data parallel: each rank keeps 1/n of every parameter, gradient and moment, and takes its part of the batch.

Torch's FSDP2 does the work (Rajbhandari et al. 2020, section 5; Zhao et al. 2023, section 3): a unit's parameters are
gathered just before they are needed and freed after, and its gradients are reduced and scattered as soon as backward
has them. On a mesh of two axes (HSDP) there are replicas of such a group, which add their shards of the gradient up.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from models.gpt import GPT


def apply_fsdp(
    model: GPT, mesh: DeviceMesh, *, reshard: bool = True, bf16: bool = False, offload: bool = False
) -> None:
    """Shards the model, in place, over the last axis of the mesh; over the first, if it has two, replicas are kept.

    Backward leaves, in each rank's shard, its part of the sum of all ranks' gradients. `reshard`: parameters are freed
    after the forward and gathered again for the backward (ZeRO-3), or kept (ZeRO-2). `bf16`: parameters are gathered,
    and computed with, in bf16, and so is the residual stream; the shards and the reduction of gradients stay float32.
    `offload`: shards and their gradients lie in host memory, where the optimizer then works too.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,  # RoPE's angles are inputs of a block and have to stay float32
    )
    on_cuda = mesh.device_type == "cuda"
    offload_policy = CPUOffloadPolicy(pin_memory=on_cuda) if offload else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload_policy)
    blocks = [shard(block, reshard_after_forward=reshard) for block in model.blocks.values()]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # backward prefetches by itself
    first: list[nn.Module | None] = [model.embedding, model.position_embedding]
    last: list[nn.Module | None] = [model.norm, model.head]
    # A parameter that embedding and head share has to be in one unit. Backward begins with the last unit: if it were
    # freed after the forward it would only be gathered once more.
    units = [([*first, *last], False)] if model.config.tie_embeddings else [(first, reshard), (last, False)]
    for modules, free in units:
        present = [module for module in modules if module is not None]
        if present:
            shard(present, reshard_after_forward=free)
    shard(model)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Each rank's loss is already divided by the token count of the whole batch: gradients are to be summed.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other way to say so
