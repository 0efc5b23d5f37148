"""A step in halves, in float64: the norms of both, the whole gradient and the loss, against plain PyTorch.

python -m tests.parallelism.test_halves 2 OUT     two ranks run the layouts that are for two, and leave OUT/NAME.pt
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from models.gpt import GPT
from parallelism.halves import halve
from parallelism.launch import run_ranks
from parallelism.mesh import start_process_group
from parallelism.nd import parallelize
from tests.cases import INTERLEAVED, MODELS, SP, ZERO2, Case, case
from tests.parity import SEED, global_batch, mesh_of, own_micro_batches, put_together
from training.noise_scale import estimate

CASES = [
    case(dp=2),
    case("gpt2", 3, dp=2),
    case("llama", 4, dp=2, dp_shard=2),
    case("llama_tied", 3, dp=2, dp_shard=2, options=ZERO2),
    case("gpt2", 3, tp=2),
    case("llama_tied", 6, tp=2, options=SP),
    case("llama", 6, cp=2),
    case("gpt2", 6, pp=2),
    case("gpt2_deep", 6, pp=2, options=INTERLEAVED),
    case("gpt2_deep", 6, pp=2, options={"pp_schedule": "zbv"}),
    case("llama_tied", 3, dp=4, dp_shard=2),
    case("gpt2", 3, pp=2, dp=2),
    case("gpt2_deep", 3, pp=2, dp=2, options={"pp_schedule": "dualpipev"}),
    case("gpt2", 3, pp=2, dp=4, dp_shard=2),
    case("gpt2_deep", 3, pp=2, dp=2, dp_shard=2, options={"pp_schedule": "zbv"}),
    case("gpt2_deep", 3, pp=2, dp=2, dp_shard=2, options=INTERLEAVED),
    case("llama_tied", 3, pp=2, tp=2, dp=2, dp_shard=2),
    case("gpt2", 3, pp=2, cp=2, dp=2),
]


def laid_out(each: Case, device: torch.device) -> dict[str, Any]:
    """What a rank finds; gradients are put together from all."""
    config, (parallel, options) = MODELS[each.model], each.settings()
    with torch.device("meta"):
        whole = GPT(config)
    model = parallelize(whole, mesh_of(each.layout, device), device, parallel, seed=SEED, **options)
    loss, halves = model.step_in_halves(own_micro_batches(each, model, 0))
    assert halves is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = put_together(gradients, config.tie_embeddings)
    return {"loss": loss, "squares": halves.squares, "tokens": halves.tokens, "gradients": gradients}


@cache
def plain(model_name: str) -> dict[str, Any]:
    """The same with one model in one process: the halves are every second sequence."""
    model = GPT(MODELS[model_name])
    model.init_weights(SEED)
    inputs, targets = global_batch(0, MODELS[model_name].vocab_size)
    num_tokens = (targets != -100).sum()
    parameters = dict(model.named_parameters())
    loss, squares, gradients = torch.zeros(()), [], {name: torch.zeros_like(p) for name, p in parameters.items()}
    for first in (0, 1):
        logits = model(inputs[first::2]).flatten(0, 1)
        half = F.cross_entropy(logits, targets[first::2].flatten(), ignore_index=-100, reduction="sum") / num_tokens
        found = torch.autograd.grad(half, list(parameters.values()))
        squares.append(torch.stack([(gradient**2).sum() for gradient in found]).sum())
        for total, gradient in zip(gradients.values(), found):
            total += gradient
        loss = loss + half.detach()
    tokens = [(targets[first::2] != -100).sum() for first in (0, 1)]
    return {"loss": loss, "squares": torch.stack(squares), "tokens": torch.stack(tokens), "gradients": gradients}


def run_cases(stop: Any, num_ranks: int, out: Path) -> int:
    """One rank."""
    torch.set_default_dtype(torch.float64)
    device = start_process_group("cpu", timeout_minutes=1)
    for each in CASES:
        if each.layout.world_size == num_ranks:
            found = laid_out(each, device)
            if dist.get_rank() == 0:
                torch.save(found, out / f"{each.name}.pt")
    dist.destroy_process_group()
    return 0


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.name)
def test_halves_have_the_norms_of_one_rank(each: Case, results_of_ranks: Any) -> None:
    found = torch.load(results_of_ranks("tests.parallelism.test_halves", each.layout.world_size) / f"{each.name}.pt")
    expected = plain(each.model)
    assert found["squares"].dtype == torch.float64
    assert found["tokens"].tolist() == expected["tokens"].tolist()
    # A float32 anywhere on the way would leave 1e-8 at the least.
    torch.testing.assert_close(found["squares"], expected["squares"], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-12, atol=0.0)
    # What is measured beside it does not change the step's gradient, and gives the same noise scale.
    gradients = expected["gradients"].values()
    whole = torch.nn.utils.get_total_norm(gradients)
    for name, gradient in expected["gradients"].items():
        assert (found["gradients"][name] - gradient).norm() <= 1e-12 * whole, name
    for one, other in zip(*(estimate_of(results) for results in (found, expected))):
        assert one == pytest.approx(other, rel=1e-10)


def estimate_of(results: dict[str, Any]) -> tuple[float, float]:
    """Of |G|^2 and tr(Sigma)."""
    whole = sum(float((gradient**2).sum()) for gradient in results["gradients"].values())
    return estimate(whole, results["squares"].tolist(), results["tokens"].tolist())


@pytest.mark.parametrize(
    ("sizes", "multiple", "expected"),
    [
        ([4, 4], None, ([4], [4])),
        ([4], None, ([2], [2])),
        ([5], None, ([3], [2])),
        ([2, 2, 2], None, ([1, 1, 1], [1, 1, 1])),  # three sequences in each half, which 2 does not divide
        ([1], None, None),
        ([5], 1, ([1, 1, 1], [1, 1])),  # a pipeline's micro-batches are all of one size
        ([4, 4], 2, ([4], [4])),
        ([2, 2, 2], 3, ([1, 1, 1], [1, 1, 1])),
        ([3, 3], 4, None),
        ([1], 1, None),
    ],
    ids=str,
)
def test_halves_are_every_second_sequence(sizes: list[int], multiple: int | None, expected: Any) -> None:
    rows = torch.arange(sum(sizes)).unsqueeze(1)
    halves = halve([(part, part + 1) for part in rows.split(sizes[0])], multiple)
    if halves is None or expected is None:
        assert halves is expected
        return
    for number, (half, lengths) in enumerate(zip(halves, expected)):
        assert [len(inputs) for inputs, _ in half] == lengths
        assert torch.cat([inputs for inputs, _ in half]).flatten().tolist() == list(range(number, sum(sizes), 2))
        assert all((targets == inputs + 1).all() for inputs, targets in half)


if __name__ == "__main__":
    num_ranks, out = int(sys.argv[1]), Path(sys.argv[2])
    sys.exit(run_ranks(run_cases, num_ranks, out, num_ranks=num_ranks))
