"""The rows of the parity table: layouts, models and options that have to train as one rank does.

A new layout, technique or option gets its rows in CASES; tests/test_parity.py does the rest.
"""

from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any

from memory.config import CKPT, OFFLOAD
from models.flops import head_layers
from parallelism.layout import CP_METHODS, Layout, ParallelConfig
from parallelism.stages import resolve_stages
from tests.models.presets import model_config

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
    case("gpt2", 3, dp=4, tp=2),
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
    case("llama", 12, cp=2, options=BF16),
    case("gpt2", 6, pp=2, options=BF16),
    case("llama", 6, pp=2, options=BF16 | {"pp_schedule": "zb_h1"}),
    case("gpt2", 3, pp=2, dp=2, dp_shard=2, options=BF16),
    case("gpt2", 1, pp=2, dp=2, dp_shard=2, options=BF16 | {"pp_schedule": "zb_h1"}),
    case("llama", 3, dp=2, dp_shard=2, options=BF16),
    case("gpt2", tp=2, options=BF16 | SP),
    case("llama_tied", 3, dp=2, dp_shard=2, tp=2, options=BF16),
    case("llama", 6, dp=2, dp_shard=2, options=BF16 | {"ckpt": "full", "offload": ["params", "activations"]}),
    case("gpt2_deep", 6, dp=2, options=BF16 | {"ckpt": "sqrt_deep", "offload": ["optimizer"]}),
    case("llama_deep", 6, tp=2, options=BF16 | {"ckpt": "selective", "offload": ["activations"]}),
]

# Memory saved where parameters are kept, where there are replicas, and where a backward comes in halves
CASES += [
    case("llama_deep", 3, dp=2, dp_shard=2, options=ZERO2 | {"ckpt": "sqrt", "offload": ["params", "activations"]}),
    case("gpt2_deep", 3, dp=4, dp_shard=2, options={"ckpt": "selective", "offload": ["optimizer", "activations"]}),
    case("llama_deep", 3, pp=2, options={"pp_schedule": "zbv", "offload": ["optimizer", "activations"]}),
]

# Ways to save memory: each alone, and each pair of them, accumulation being one
PLANS = [{"ckpt": plan} for plan in CKPT[1:]]
OFFLOADS = [{"offload": [what]} for what in OFFLOAD]
WAYS: list[dict[str, Any]] = [
    *PLANS,
    *OFFLOADS,
    *(plan | offload for plan in PLANS for offload in OFFLOADS),
    *({"offload": [*pair]} for pair in combinations(OFFLOAD, 2)),
]
ON: list[dict[str, Any]] = [
    {"model": "llama_deep", "dp": 2, "dp_shard": 2},
    {"model": "gpt2_deep", "dp": 2},
    {"model": "gpt2_deep", "tp": 2, "options": SP},
    {"model": "llama_deep", "pp": 2},
    {"model": "llama_deep", "pp": 2, "tp": 2, "dp": 2, "dp_shard": 2},
    {"model": "gpt2_deep", "cp": 2, "options": {"cp_method": "ulysses"}},
]


def with_way(on: dict[str, Any], way: dict[str, Any], micro_batches: int) -> Case:
    """A row of MEMORY."""
    micro_batch = SEQUENCES // on.get("dp", 1) // micro_batches
    return case(**on | {"micro_batch": micro_batch, "options": on.get("options", {}) | way})


MEMORY = [
    with_way(on, way, micro_batches)
    for on in ON
    for way in WAYS
    if "params" not in way.get("offload", ()) or "dp_shard" in on
    for micro_batches in ((1, 2) if "pp" not in on else (2,))
    if len(way) == 1 or micro_batches == 2
]
# Of the table proper each way on one of the layouts, and with FSDP those it is alone to have; the others are slow.
CASES += [
    with_way(ON[0] if "params" in way.get("offload", ()) else ON[(index + index // 3) % len(ON)], way, 2)
    for index, way in enumerate(WAYS)
]

DROPPING = [  # no loss to equal here; but what ranks hold twice has to stay the same on both
    case("gpt2_dropout", 12, tp=2),
    case("gpt2_dropout", 12, tp=2, options=SP),
    case("gpt2_dropout", 6, dp=2, dp_shard=2, tp=2),
    case("gpt2_dropout", 6, pp=2, dp=2),
    case("gpt2_dropout", 6, cp=2, options={"cp_method": "ulysses"}),
]
