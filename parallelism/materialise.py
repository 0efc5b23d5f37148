"""From a model on the meta device to one with its initial weights, without a rank ever holding the whole.

Each rank draws every parameter, one at a time on the CPU, and keeps its shard: about six seconds per billion.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from models.gpt import GPT
from models.init import initial_tensor


@torch.no_grad()
def materialise(model: GPT, device: torch.device, seed: int) -> None:
    """Gives every parameter memory on the device and its initial value, one whole parameter at a time on the CPU."""
    model.to_empty(device=device)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        whole = initial_tensor(name, parameter.shape, model.config, seed)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(own_shard(whole, parameter))
        else:
            parameter.copy_(whole)


def own_shard(whole: Tensor, parameter: DTensor) -> Tensor:
    """The part of `whole` that this rank holds of a parameter.

    Inner axes come first: FSDP cuts what tensor parallelism has left of a parameter, and not the other way round (torch
    calls such a placement strided; its own functions do not cut uneven ones).
    """
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            size, rank = -(-whole.shape[placement.dim] // mesh.size(axis)), mesh.get_local_rank(axis)
            first = min(rank * size, whole.shape[placement.dim])
            whole = whole.narrow(placement.dim, first, min(size, whole.shape[placement.dim] - first))
    return whole
