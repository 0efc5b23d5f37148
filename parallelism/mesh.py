"""The process group and the device mesh of a layout."""

import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallelism.layout import Layout, node_warning

T = TypeVar("T")

log = logging.getLogger(__name__)


def start_process_group(device: str, timeout_minutes: float) -> torch.device:
    """Meets the other ranks, by gloo on CPUs and NCCL (with gloo beside it for CPU tensors) on GPUs.

    Returns this rank's device. Any collective of all ranks that waits longer than the timeout raises.
    """
    timeout = timedelta(minutes=timeout_minutes)
    if device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    # Under srun --gpus-per-task=1 a rank sees its own GPU alone, as number 0.
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=own)
    return own


@dataclass(frozen=True)
class Mesh:
    """The ranks of a layout in the groups in which they meet; `layout.place` says where a rank stands."""

    layout: Layout
    weights: DeviceMesh  # axes pp, replicas, shard, tp: how parameters lie; ranks of cp hold the same, as replicas do
    cp: DeviceMesh  # one axis: the ranks that share a sequence


def make_mesh(layout: Layout, device: torch.device, timeout_minutes: float) -> Mesh:
    """Groups of the ranks, tp innermost, then cp, shard, replicate and pp: who talks most is nearest.

    Any collective in one of them that waits longer than the timeout raises.
    """
    warning = node_warning(layout, int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size)))
    if warning:
        log.warning(warning)
    sizes = {"p": layout.pp, "r": layout.dp // layout.dp_shard, "s": layout.dp_shard, "c": layout.cp, "t": layout.tp}
    ranks = rearrange(torch.arange(layout.world_size), "(p r s c t) -> p r s c t", **sizes)
    weights = rearrange(ranks, "p r s c t -> p (r c) s t")
    cp = rearrange(ranks, "p r s c t -> (p r s t) c")
    # A mesh would make its groups by itself, and one more for every axis of one rank. On CPUs each has a thread that
    # wakes a hundred times a second, which is most of what many ranks on few cores then do.
    groups: dict[tuple[int, ...], ProcessGroup] = {}

    def group_along(axis: int, mesh: Tensor) -> ProcessGroup:
        lines = mesh.movedim(axis, -1).flatten(0, -2).tolist()
        (line,) = (tuple(line) for line in lines if dist.get_rank() in line)
        if line not in groups:
            timeout = timedelta(minutes=timeout_minutes)
            groups[line] = dist.new_group(line, timeout=timeout, use_local_synchronization=True)
        return groups[line]

    axes = ("pp", "replicas", "shard", "tp")
    groups_of_weights = [group_along(axis, weights) for axis in range(len(axes))]
    return Mesh(
        layout,
        DeviceMesh.from_group(groups_of_weights, device.type, weights, mesh_dim_names=axes),
        DeviceMesh.from_group(group_along(1, cp), device.type),
    )


def once_per_node(work: Callable[[], T], mistake: type[Exception]) -> T:
    """The result of `work`, which one rank of each node runs while all others wait, for days if need be.

    The result has to pickle. If work raises a `mistake`, on whichever node, every rank raises it.
    """
    patient = timedelta(days=7)
    everyone = dist.new_group(backend="gloo", timeout=patient)
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, platform.node(), group=everyone)
    first_ranks = {host: hosts.index(host) for host in hosts}

    outcome: tuple[T | None, Exception | None] = (None, None)
    if first_ranks[platform.node()] == dist.get_rank():
        try:
            outcome = (work(), None)
        except mistake as error:
            outcome = (None, error)
    outcomes = [outcome] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome, group=everyone)
    dist.destroy_process_group(everyone)
    for _, mistaken in outcomes:
        if mistaken is not None:
            raise mistaken
    return outcomes[first_ranks[platform.node()]][0]  # type: ignore[return-value]
