"""Attention over ranks against the whole of it in one process, in float64."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.gpt import AttentionCore
from parallelism.cp import CORES, own_positions
from parallelism.launch import run_ranks
from parallelism.mesh import start_process_group
from parallelism.stop import Stop
from tests.cli import ROOT

HEADS, KV_HEADS, SEQ_LEN = 8, (8, 2, 1), 16


def inputs(kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole q, k, v and the gradient of the output, (2, heads, SEQ_LEN, 6) float64."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    q, k, v, gradient = (torch.randn(2, n, SEQ_LEN, 6, dtype=torch.float64, generator=generator) for n in heads)
    return q, k, v, gradient


def attend_here(stop: Stop, num_ranks: int, out: Path) -> int:
    """One rank: its part of the output and of the gradients, for every method and number of kv heads."""
    start_process_group("cpu", timeout_minutes=1)
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for method, core in CORES.items():
        own = own_positions(SEQ_LEN, dist.get_rank(), num_ranks, method)
        for kv_heads in KV_HEADS:
            q, k, v, gradient = (whole[:, :, own] for whole in inputs(kv_heads))
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            y = core(group, AttentionCore(0.0))(*leaves)
            y.backward(gradient)
            found[method, kv_heads] = [y.detach(), *(x.grad for x in leaves)]
    torch.save(found, out / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
    return 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equal_to_whole_attention(num_ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallelism.test_cp", str(num_ranks), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    for method, kv_heads in ranks[0]:
        q, k, v, gradient = inputs(kv_heads)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(HEADS // kv_heads, 1) for x in leaves[1:])
        y = F.scaled_dot_product_attention(leaves[0], keys, values, is_causal=True)
        y.backward(gradient)
        for rank, found in enumerate(ranks):
            own = own_positions(SEQ_LEN, rank, num_ranks, method)
            for part, whole in zip(found[method, kv_heads], [y, *(x.grad for x in leaves)]):
                assert whole is not None
                assert (part - whole[:, :, own]).abs().max() < 1e-10, (method, kv_heads, rank)


if __name__ == "__main__":
    sys.exit(run_ranks(attend_here, int(sys.argv[1]), Path(sys.argv[2]), num_ranks=int(sys.argv[1])))
