"""Every layout against one rank: the ranks that run cases, and the plain loop that these must equal.

python -m tests.parity 4 OUT        four ranks run those of tests/cases.py that are for four, and leave OUT/NAME.pt
python -m tests.parity 4 OUT 17     the same of the random products that seed 17 draws: tests/products.py
python -m tests.parity 2 OUT memory   the same of every way to save memory, alone and in pairs, on every layout
"""

import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memory.offload_optimizer import HostOptimizer
from models.config import ModelConfig
from models.gpt import GPT
from parallelism.distributed_model import DistributedModel
from parallelism.launch import run_ranks
from parallelism.layout import Layout
from parallelism.mesh import Mesh, make_mesh, start_process_group
from parallelism.nd import parallelize
from parallelism.stop import Stop
from tests.cases import CASES, DROPPING, MEMORY, MODELS, SEQ_LEN, SEQUENCES, Case
from tests.products import random_products

SEED = 1
STEPS = 3
MAX_NORM = 0.5  # below the norm of every first gradient here, so that clipping takes part

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # shows a constant factor, which AdamW hides
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.1, fused=True),
}


def global_batch(step: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets (SEQUENCES, SEQ_LEN) of a step, with more invalid targets from one sequence to the next."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab_size, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for index in range(SEQUENCES):
        targets[index, :index] = -100
    return tokens[:, :-1], targets


def some_tokens(vocab_size: int) -> Tensor:
    """Tokens (1, 7) to continue: no number of ranks divides 7."""
    return global_batch(STEPS, vocab_size)[0][:1, :7]


def plain_run(config: ModelConfig, optimizer_name: str) -> dict[str, Any]:
    """What every case must equal: one model in one process, plain PyTorch, the whole batch in one forward."""
    model = GPT(config)
    model.init_weights(SEED)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        inputs, targets = global_batch(step, config.vocab_size)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        inputs, targets = global_batch(STEPS, config.vocab_size)
        eval_loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
        logits = model(some_tokens(config.vocab_size))[:, -1]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {
        "losses": torch.stack(losses), "norms": torch.stack(norms), "gradients": gradients, "weights": weights,
        "eval_loss": eval_loss, "logits": logits,
    }  # fmt: skip


def laid_out_run(case: Case, optimizer_name: str, device: torch.device) -> dict[str, Any]:
    """The same through `parallelize`, in this rank; gradients and weights are put together from all ranks' shards."""
    config = MODELS[case.model]
    tied = config.tie_embeddings
    with torch.device("meta"):
        whole = GPT(config)
    parallel, options = case.settings()
    model = parallelize(whole, mesh_of(case.layout, device), device, parallel, seed=SEED, **options)
    optimizer: Any = OPTIMIZERS[optimizer_name](model.parameters())
    if "optimizer" in options.get("offload", ()):
        optimizer = HostOptimizer(model.parameters(), device, OPTIMIZERS[optimizer_name])
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        torch.manual_seed(STEPS * model.dropout_part + step)
        losses.append(model.step(own_micro_batches(case, model, step)))
        if step == 0:
            gradients = put_together({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, tied)
        norms.append(model.clip_grad_norm(MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
    eval_loss = torch.tensor(model.evaluate(own_micro_batches(case, model, STEPS)))
    logits = model.next_logits(some_tokens(config.vocab_size))
    weights = put_together({name: p.detach() for name, p in model.named_parameters()}, tied)
    return {
        "losses": torch.stack(losses), "norms": torch.stack(norms), "gradients": gradients, "weights": weights,
        "eval_loss": eval_loss, "logits": logits,
    }  # fmt: skip


@cache
def mesh_of(layout: Layout, device: torch.device) -> Mesh:
    """One for all cases of a layout: each takes threads and sockets."""
    return make_mesh(layout, device, timeout_minutes=1)


def own_micro_batches(case: Case, model: DistributedModel, step: int) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of a step."""
    part, num_parts = model.data_part
    inputs, targets = (whole.chunk(num_parts)[part] for whole in global_batch(step, MODELS[case.model].vocab_size))
    return list(zip(inputs.split(case.micro_batch), targets.split(case.micro_batch)))


def put_together(tensors: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    """The whole tensors from what all ranks hold of them, in rank 0, which asserts that replicas are equal.

    A head that is `tied` to the embedding is one with it, whichever pipeline stages have them.
    """
    held = [
        ("embedding.weight" if tied and name == "head.weight" else name, *shard_of(x)) for name, x in tensors.items()
    ]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(held, by_rank if dist.get_rank() == 0 else None)
    if dist.get_rank() > 0:
        return {}
    copies: dict[str, list[Shard]] = defaultdict(list)
    for rank in by_rank:
        for name, place, cuts, shard in rank:
            copies[name].append((place, cuts, shard))
    return {name: joined(shards) for name, shards in copies.items()}


Shard: TypeAlias = tuple[tuple[int, ...], tuple[int | None, ...], Tensor]


def shard_of(tensor: Tensor) -> Shard:
    """This rank's place on a tensor's mesh, the dimension that each axis of the mesh cuts, and its part."""
    if not isinstance(tensor, DTensor):
        return (), (), tensor
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    cuts = tuple(None if p.is_replicate() else p.dim for p in tensor.placements)  # type: ignore[attr-defined]
    return tuple(place), cuts, tensor.to_local()


def joined(held: list[Shard]) -> Tensor:
    """One whole tensor from all its shards."""
    shards: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for place, _, shard in held:
        shards[place].append(shard)
    for cut in held[0][1]:  # FSDP's axes come first, and cut last
        parts: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for place, copies in sorted(shards.items(), key=lambda item: item[0]):
            parts[place[1:]].append(same(copies))
        shards = parts if cut is None else {place: [torch.cat(pieces, cut)] for place, pieces in parts.items()}
    (whole,) = shards.values()
    return same(whole)


def same(tensors: list[Tensor]) -> Tensor:
    """One of the tensors, which have to be equal."""
    for tensor in tensors[1:]:
        torch.testing.assert_close(tensor, tensors[0], rtol=0.0, atol=0.0)
    return tensors[0]


def run_cases(stop: Stop, cases: list[Case], num_ranks: int, out: Path) -> int:
    """One rank: all of the cases that are of this number of ranks."""
    device = start_process_group("cpu", timeout_minutes=1)
    for case in cases:
        if case.layout.world_size == num_ranks:
            results = {name: laid_out_run(case, name, device) for name in OPTIMIZERS}
            if dist.get_rank() == 0:
                torch.save(results, out / f"{case.name}.pt")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    num_ranks, out = int(sys.argv[1]), Path(sys.argv[2])
    chosen = sys.argv[3] if len(sys.argv) > 3 else ""
    cases = MEMORY if chosen == "memory" else random_products(int(chosen)) if chosen else CASES + DROPPING
    sys.exit(run_ranks(run_cases, cases, num_ranks, out, num_ranks=num_ranks))
