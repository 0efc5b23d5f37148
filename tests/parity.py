"""Every layout against one rank: the table of cases, the ranks that run them, and the plain loop they must equal.

    python -m tests.parity 4 OUT      four ranks run the cases of four ranks, one after the other, and leave OUT/NAME.pt

A new layout, technique or option gets its rows in CASES; tests/test_parity.py does the rest.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.config import ModelConfig
from models.flops import head_layers
from models.gpt import GPT
from parallelism.distributed_model import DistributedModel
from parallelism.launch import run_ranks
from parallelism.layout import CP_METHODS, Layout, ParallelConfig
from parallelism.mesh import make_mesh, start_process_group
from parallelism.nd import parallelize
from parallelism.stages import resolve_stages
from parallelism.stop import Stop
from tests.models.presets import model_config

SEED = 1
STEPS = 3
MAX_NORM = 0.5  # below the norm of every first gradient here, so that clipping takes part
SEQUENCES, SEQ_LEN = 24, 24  # divides by every number of ranks here
SMALL = {"layers": 2, "dim": 48, "heads": 24, "context": 32}
LLAMA = {"mlp": "swiglu", "ffn_dim": 100, "rope_original_context": 16}
MODELS = {
    "gpt2": model_config("gpt2", **SMALL, vocab_size=65),
    "gpt2_deep": model_config("gpt2", **SMALL | {"layers": 5}, vocab_size=65),  # stages are uneven
    "llama_deep": model_config("llama3_8b", **SMALL | {"layers": 9}, **LLAMA, kv_heads=6, vocab_size=11),
    "gpt2_even": model_config("gpt2", **SMALL, vocab_size=64),  # shards without padding: for counting
    "gpt2_dropout": model_config("gpt2", **SMALL, vocab_size=65, dropout=0.2),
    "gpt2_untied": model_config("gpt2", **SMALL, vocab_size=11, tie_embeddings=False),
    "llama": model_config("llama3_8b", **SMALL, **LLAMA, kv_heads=6, vocab_size=65),  # 4 and 8 ranks can't share them
    "llama_tied": model_config("llama3_1b", **SMALL, **LLAMA, kv_heads=2, vocab_size=11),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # shows a constant factor, which AdamW hides
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, weight_decay=0.1, fused=True),
}

PARALLEL = ParallelConfig(
    sequence_parallel=False, reshard=True, cp_method="ring", pp_schedule="1f1b", pp_virtual="auto", pp_split="auto"
)


@dataclass(frozen=True)
class Case:
    """One row: a layout, a model, and what else is chosen."""

    layout: Layout
    model: str = "gpt2"
    micro_batch: int = SEQUENCES
    options: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> tuple[ParallelConfig, dict[str, Any]]:
        """The options that are keys of `parallel`, and the others."""
        names = {field.name for field in fields(ParallelConfig)}
        parallel = replace(PARALLEL, **{key: value for key, value in self.options.items() if key in names})
        config = MODELS[self.model]
        parallel = resolve_stages(parallel, self.layout, layers=config.layers, head_layers=head_layers(config))
        return parallel, {key: value for key, value in self.options.items() if key not in names}

    @property
    def name(self) -> str:
        """Says all of it; names the file of its results."""
        degrees = [f"{axis}{degree}" for axis, degree in self.layout.degrees().items() if degree > 1] or ["one"]
        micro = [f"micro{self.micro_batch}"] if self.micro_batch < SEQUENCES else []
        return "-".join([*degrees, self.model, *micro, *(f"{key}={value}" for key, value in self.options.items())])


def case(
    model: str = "gpt2", micro_batch: int = SEQUENCES, *, options: dict[str, Any] | None = None, **degrees: int
) -> Case:
    """A row, with dp=1 unless it says more."""
    return Case(Layout(**{"dp": 1, **degrees}), model, micro_batch, options or {})


SP = {"sequence_parallel": True}
ZERO2 = {"reshard": False}
BF16 = {"precision": "bf16"}
INTERLEAVED = {"pp_schedule": "interleaved_1f1b"}
CASES = [
    case(),
    case(micro_batch=5),
    case("llama", 7),
    # dp
    case(dp=2),
    case("llama_tied", 4, dp=2),
    case("gpt2_untied", 3, dp=3),
    case("llama", 2, dp=4),
    case(dp=8, micro_batch=1),
    # fsdp
    case(dp=2, dp_shard=2),
    case("llama", 4, dp=2, dp_shard=2),
    case("gpt2_untied", dp=3, dp_shard=3),
    case("llama_tied", 3, dp=3, dp_shard=3, options=ZERO2),
    case("llama", dp=4, dp_shard=4, options=ZERO2),
    case("gpt2", 2, dp=4, dp_shard=4, options=ZERO2),
    case("llama_tied", 1, dp=6, dp_shard=6),
    case(dp=8, dp_shard=8),
    # hsdp
    case(dp=4, dp_shard=2),
    case("llama", 2, dp=4, dp_shard=2),
    case("llama_tied", 2, dp=6, dp_shard=3, options=ZERO2),
    case("gpt2_untied", 2, dp=6, dp_shard=2),
    case("gpt2", 1, dp=8, dp_shard=4),
    # tp
    case(tp=2),
    case("llama", 5, tp=2),
    case("gpt2", 5, tp=2, options=SP),
    case("gpt2_untied", tp=3),
    case("llama_tied", tp=3, options=SP),
    case("llama", tp=4),
    case("llama", 12, tp=4, options=SP),
    case("llama_tied", tp=6),
    case("llama", tp=8),
    case("gpt2_untied", tp=8, options=SP),
    case("llama_tied", tp=8, options=SP),
    # cp
    *(
        case(model, 12, cp=cp, options={"cp_method": method})
        for method in CP_METHODS
        for model, cp in (("gpt2", 2), ("llama", 4), ("llama_tied", 2))
    ),
    case("llama", 5, cp=3),
    case("llama_tied", cp=8, options={"cp_method": "ulysses"}),  # 2 kv heads: each repeated 4 times
    case("gpt2_untied", 6, cp=4, options={"cp_method": "allgather"}),
    # pp
    *(
        case(model, micro_batch, pp=pp, options={"pp_schedule": schedule})
        for schedule in ("naive", "gpipe", "1f1b", "zb_h1")
        for model, micro_batch, pp in (("gpt2", 12, 2), ("llama", 4, 2), ("gpt2_deep", 3, 4))
    ),
    *(
        case(model, micro_batch, pp=pp, options={"pp_schedule": schedule})
        for schedule in ("interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")
        for model, micro_batch, pp in (("gpt2_deep", 6, 2), ("llama_deep", 3, 4))
    ),
    case("llama_deep", 8, pp=2, options={"pp_schedule": "interleaved_zb", "pp_virtual": 4}),
    case("gpt2_deep", 6, pp=4, options={"pp_split": "llama3"}),
    case("gpt2_deep", 6, pp=2, options={"pp_split": [1, 4]}),
    case("gpt2_deep", 4, pp=2, options={"pp_split": [0, 1, 4, 0], "pp_schedule": "zbv"}),
    case("gpt2", 6, pp=2, dp=2),
    case("llama_tied", 3, pp=2, dp=2, dp_shard=2),
    case("gpt2", 3, pp=2, dp=2, dp_shard=2, options={"pp_schedule": "zb_h1"}),
    case("llama", 3, pp=2, dp=2, options={"pp_schedule": "zb_h1"}),
    case("gpt2_deep", 3, pp=2, dp=2, dp_shard=2, options=INTERLEAVED | ZERO2),
    case("gpt2_deep", 3, pp=2, dp=2, dp_shard=2, options={"pp_schedule": "interleaved_zb"}),
    case("llama_deep", 3, pp=2, dp=2, dp_shard=2, options={"pp_schedule": "zbv"}),
    case("gpt2_deep", 3, pp=2, dp=2, options={"pp_schedule": "zbv"}),
    case("gpt2_deep", 3, pp=2, dp=2, dp_shard=2, options={"pp_schedule": "dualpipev"}),
    case("llama_deep", 3, pp=2, dp=2, options={"pp_schedule": "looped_bfs"}),
    case("llama_deep", 6, pp=2, dp=2, dp_shard=2, options={"pp_schedule": "interleaved_zb", "pp_virtual": 4}),
    case("gpt2_deep", 6, pp=2, tp=2, options={"pp_schedule": "zbv"}),
    case("llama_deep", 6, pp=2, cp=2, options={"pp_schedule": "dualpipev"}),
    case("gpt2", 6, pp=2, tp=2),
    case("llama", 6, pp=2, tp=2, options=SP | {"pp_schedule": "zb_h1"}),
    case("llama_tied", 6, pp=2, cp=2),
    case("gpt2", 6, pp=2, cp=2, options={"cp_method": "ulysses", "pp_schedule": "gpipe"}),
    case("llama_tied", 3, pp=2, tp=2, dp=2),
    case("gpt2_deep", 3, pp=2, tp=2, dp=2, dp_shard=2, options=INTERLEAVED | SP),
    case("llama", 3, pp=2, cp=2, dp=2, dp_shard=2),
    case("gpt2", 6, pp=2, cp=2, tp=2, options=SP | {"cp_method": "allgather"}),
    case("llama_tied", 2, pp=2, dp=4, dp_shard=2, options={"pp_schedule": "zb_h1"}),
    case("gpt2", 3, pp=2, dp=2, dp_shard=2, options=BF16),
    case("gpt2", 6, pp=2, options=BF16),
    case("llama", 6, pp=2, options=BF16 | {"pp_schedule": "zb_h1"}),
    # products
    case("llama", 6, cp=2, dp=2),
    case("gpt2", 6, cp=2, dp=2, dp_shard=2),
    case("llama", 6, cp=2, dp=2, dp_shard=2, options={"cp_method": "allgather"} | ZERO2),
    case("llama_tied", 12, cp=2, tp=2, options=SP),
    case("gpt2_untied", cp=2, tp=2, options={"cp_method": "ulysses"}),
    case("llama", 6, cp=2, tp=2, dp=2, options={"cp_method": "ulysses"} | SP),
    case("gpt2", 6, cp=2, tp=2, dp=2, dp_shard=2, options=SP),
    case("llama", 3, cp=2, dp=4, dp_shard=2),
    case("llama_tied", 3, dp=2, tp=2),
    case("gpt2", 3, dp=2, tp=2, options=SP),
    case("llama", 3, dp=2, dp_shard=2, tp=2),
    case("llama", 6, dp=2, dp_shard=2, tp=2, options=SP | ZERO2),
    case("gpt2", 2, dp=3, dp_shard=3, tp=2, options=SP),
    case("gpt2_untied", 3, dp=2, dp_shard=2, tp=3),
    case("llama", 2, dp=3, tp=2),
    case("gpt2", 3, dp=4, dp_shard=4, tp=2, options=SP),
    case("llama", 3, dp=4, dp_shard=2, tp=2, options=SP),
    case("gpt2_untied", 3, dp=4, dp_shard=2, tp=2),
    case("llama", 6, dp=2, dp_shard=2, tp=4, options=SP),
    case("llama_tied", 6, dp=2, tp=4),
    # bf16
    case("llama", options=BF16),
    case("llama", 3, dp=2, dp_shard=2, options=BF16),
    case("gpt2", tp=2, options=BF16 | SP),
    case("llama_tied", 3, dp=2, dp_shard=2, tp=2, options=BF16),
]

DROPPING = [  # no loss to equal here; but what ranks hold twice has to stay the same on both
    case("gpt2_dropout", 12, tp=2),
    case("gpt2_dropout", 12, tp=2, options=SP),
    case("gpt2_dropout", 6, dp=2, dp_shard=2, tp=2),
]


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
    model = parallelize(whole, make_mesh(case.layout, device, 1), device, parallel, seed=SEED, **options)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
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


def run_cases(stop: Stop, num_ranks: int, out: Path) -> int:
    """One rank: all cases of this number of ranks."""
    device = start_process_group("cpu", timeout_minutes=1)
    for case in CASES + DROPPING:
        if case.layout.world_size == num_ranks:
            results = {name: laid_out_run(case, name, device) for name in OPTIMIZERS}
            if dist.get_rank() == 0:
                torch.save(results, out / f"{case.name}.pt")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_ranks(run_cases, int(sys.argv[1]), Path(sys.argv[2]), num_ranks=int(sys.argv[1])))
