"""The process group and the device mesh of a layout."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallelism.layout import Layout

T = TypeVar("T")


def start_process_group(device: str, timeout_minutes: float) -> torch.device:
    """Meets the other ranks, by gloo on CPUs and NCCL (with gloo beside it for CPU tensors) on GPUs.

    Returns this rank's device. Any collective that waits longer than the timeout raises.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=own)
    return own


def make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """One mesh axis per axis of the layout, by its name."""
    return init_device_mesh(device.type, (layout.dp,), mesh_dim_names=("dp",))


def once_per_node(work: Callable[[], T]) -> T:
    """The result of `work`, which the first rank of each node runs while the node's others wait, for days if need be.

    The result has to pickle. A ValueError (a user's mistake) is raised in every rank alike.
    """
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    group, _ = dist.new_subgroups(group_size=local_world_size, backend="gloo", timeout=timedelta(days=7))
    result: list[T | ValueError | None] = [None]
    if local_rank == 0:
        try:
            result[0] = work()
        except ValueError as error:
            result[0] = error
    dist.broadcast_object_list(result, src=dist.get_rank() - local_rank, group=group)
    if isinstance(result[0], ValueError):
        raise result[0]
    return result[0]  # type: ignore[return-value]
