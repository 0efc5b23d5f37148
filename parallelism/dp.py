"""Data parallel: every rank holds the whole model and takes its share of each batch; gradients are summed.

Torch's DistributedDataParallel does the work (Li et al. 2020, section 3): gradients are gathered in buckets, and a
bucket's all-reduce runs while backward still computes the next.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def apply_dp(model: nn.Module, mesh: DeviceMesh) -> DistributedDataParallel:
    """Wraps the model so that backward leaves the sum of all ranks' gradients on every rank.

    The ranks of the mesh (one axis) must hold equal weights already. Under the result's `no_sync()` gradients only
    accumulate on their rank.
    """
    replicated = DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,  # else every gradient would be held twice
        init_sync=False,  # initial weights follow from seed and name: nothing to broadcast
    )
    replicated.register_comm_hook(mesh.get_group(), _sum)
    return replicated


def _sum(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook averages; ours sums, since each loss is already divided by the whole batch's token count."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def sum_gradients(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sums gradients that backward has left alone, in place, over the ranks of a group."""
    works = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
    for work in works:
        assert work is not None
        work.wait()
