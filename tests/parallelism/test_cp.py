"""Attention over ranks against the whole of it in one process, in float64."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.gpt import GPT, AttentionCore
from parallelism import cp
from parallelism.cp import CORES, own_positions
from parallelism.launch import run_ranks
from parallelism.layout import Layout
from parallelism.mesh import make_mesh, start_process_group
from parallelism.nd import parallelize
from parallelism.stop import Stop
from tests.cases import MODELS, SEQUENCES, Case
from tests.cases import SEQ_LEN as PARITY_SEQ_LEN
from tests.cli import ROOT
from tests.parallelism.conftest import Measure
from tests.parity import own_micro_batches

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
    command = [sys.executable, "-m", "tests.parallelism.test_cp", "attend_here", str(num_ranks), str(tmp_path)]
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


def keys_and_values(model: str, num_ranks: int) -> int:
    """Elements of k and v of all layers for a rank's own tokens, which are 1/cp of the batch's."""
    config = MODELS[model]
    return config.layers * 2 * SEQUENCES * PARITY_SEQ_LEN // num_ranks * config.num_kv_heads * config.head_dim


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ring_receives_the_keys_and_values_of_all_others(num_ranks: int, measure: Measure) -> None:
    """Of c ranks' in forward c - 1, in backward again, and then the gradients of all c: those of its own come home."""
    block = keys_and_values("llama", num_ranks)
    measured = measure("llama", cp=num_ranks)
    assert measured["received_in_evaluation"] == (num_ranks - 1) * block
    assert measured["received"] == (num_ranks - 1) * block + (num_ranks - 1) * block + num_ranks * block
    assert measured["sent"] == measured["received"]
    assert measured["gathered"] == measured["scattered"] == 0


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_allgather_gathers_all_keys_and_values(num_ranks: int, measure: Measure) -> None:
    """In forward and in backward once each; the gradients are then reduced and scattered. A rank has 1/c of all."""
    whole = num_ranks * keys_and_values("llama", num_ranks)
    measured = measure("llama", options={"cp_method": "allgather"}, cp=num_ranks)
    assert measured["gathered_in_evaluation"] == whole
    assert measured["gathered"] == 2 * whole
    assert measured["scattered"] == whole
    assert measured["received"] == 0


def test_ulysses_trades_its_own_queries_keys_values_and_outputs(measure: Measure) -> None:
    """Once in forward, once in backward; 1/c of them a rank keeps."""
    queries = MODELS["llama"].layers * SEQUENCES * PARITY_SEQ_LEN // 2 * MODELS["llama"].dim
    measured = measure("llama", options={"cp_method": "ulysses"}, cp=2)
    assert measured["scattered_in_evaluation"] == 2 * queries + keys_and_values("llama", 2)
    assert measured["scattered"] == 2 * measured["scattered_in_evaluation"]
    assert measured["gathered"] == measured["received"] == 0


def test_ulysses_repeats_the_fewest_kv_heads_that_do(measure: Measure) -> None:
    """6 kv heads on 4 ranks: 12 are divided by 4, so each is sent twice."""
    queries = MODELS["llama"].layers * SEQUENCES * PARITY_SEQ_LEN // 4 * MODELS["llama"].dim
    measured = measure("llama", options={"cp_method": "ulysses"}, cp=4)
    assert measured["scattered_in_evaluation"] == 2 * queries + 2 * keys_and_values("llama", 4)


def watch_tokens_and_blocks(stop: Stop, num_ranks: int, out: Path) -> int:
    """Rank 0 writes how many tokens of a sequence the modules outside attention saw, and how many blocks ring held."""
    device = start_process_group("cpu", timeout_minutes=1)
    case = Case(Layout(dp=1, cp=num_ranks), "llama")
    with torch.device("meta"):
        whole = GPT(MODELS[case.model])
    parallel, _ = case.settings()
    model = parallelize(whole, make_mesh(case.layout, device, 1), device, parallel, seed=1)
    tokens: list[int] = []
    for stage in model.stages.values():
        for name, module in stage.named_modules():
            if name and "core" not in name:
                module.register_forward_hook(lambda module, inputs, output: tokens.append(output.shape[1]))
    held: list[int] = []
    blocks: WeakSet[Tensor] = WeakSet()

    def pass_on(block: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
        blocks.add(block)
        held.append(len(blocks) + 1)  # and the one that is arriving
        return original(block, group)

    original, cp.pass_on = cp.pass_on, pass_on
    model.evaluate(own_micro_batches(case, model, 0))
    if dist.get_rank() == 0:
        torch.save((tokens, held), out / "watched.pt")
    dist.destroy_process_group()
    return 0


def test_a_rank_holds_its_tokens_and_two_blocks_of_keys_and_values(tmp_path: Path) -> None:
    """Outside attention T/cp tokens; in it, of the others' keys and values, the block that is here and the next."""
    command = [sys.executable, "-m", "tests.parallelism.test_cp", "watch_tokens_and_blocks", "4", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tokens, held = torch.load(tmp_path / "watched.pt")
    assert len(tokens) > 2 * MODELS["llama"].layers
    assert set(tokens) == {PARITY_SEQ_LEN // 4}
    assert len(held) == MODELS["llama"].layers * 3
    assert set(held) == {2}


if __name__ == "__main__":
    work = {"attend_here": attend_here, "watch_tokens_and_blocks": watch_tokens_and_blocks}[sys.argv[1]]
    sys.exit(run_ranks(work, int(sys.argv[2]), Path(sys.argv[3]), num_ranks=int(sys.argv[2])))
