"""Collectives on two ranks: what they give, and that one which waits too long raises."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallelism.collectives import _exchange_and_add, _native_reduce_scatter, all_gather
from parallelism.launch import run_ranks
from parallelism.layout import Layout
from parallelism.mesh import make_mesh, start_process_group
from parallelism.stop import Stop
from parallelism.tp import OwnDropout
from tests.cli import ROOT


class Drop(nn.Module):
    """In the place of an attention core: drops half of q."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(q, 0.5)


def check(stop: Stop, out: Path) -> int:
    """One of two ranks; rank 0 writes what the tests look at."""
    device = start_process_group("cpu", timeout_minutes=1)
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(24.0).view(2, 3, 4) * (dist.get_rank() + 1)
    found: dict[str, object] = {
        "native": _native_reduce_scatter(x, -1, group),
        "exchanged": _exchange_and_add(x, -1, group),
    }
    torch.manual_seed(0)
    ones = torch.ones(1000)
    found["dropped"] = all_gather(OwnDropout(Drop(), dist.get_rank())(ones, ones, ones), 0, group).chunk(2)
    found["drawn after"] = all_gather(torch.rand(5), 0, group).chunk(2)

    mesh = make_mesh(Layout(dp=1, tp=2), device, timeout_minutes=1 / 60)
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(2), group=mesh.weights["tp"].get_group())  # to which rank 1 does not come
        except RuntimeError as error:
            found["waited"] = str(error)
        torch.save(found, out)
    return 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("collectives") / "found.pt"
    command = [sys.executable, "-m", "tests.parallelism.test_collectives", str(out)]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(out)


def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(found: dict[str, Any]) -> None:
    expected = (3 * torch.arange(24.0)).view(2, 3, 4)[..., :2]
    torch.testing.assert_close(found["native"], expected, rtol=0, atol=0)
    torch.testing.assert_close(found["exchanged"], expected, rtol=0, atol=0)


def test_attention_dropout_differs_between_tp_ranks_and_leaves_their_random_state_equal(found: dict[str, Any]) -> None:
    one, other = found["dropped"]
    assert 400 < (one == 0).sum() < 600
    assert 400 < ((one == 0) != (other == 0)).sum() < 600
    torch.testing.assert_close(*found["drawn after"], rtol=0, atol=0)


def test_a_collective_of_an_axis_waits_no_longer_than_the_timeout(found: dict[str, Any]) -> None:
    assert "Timed out waiting 1000ms" in found["waited"]


if __name__ == "__main__":
    sys.exit(run_ranks(check, Path(sys.argv[1]), num_ranks=2))
