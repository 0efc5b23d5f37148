"""The degrees of a layout: a frozen value that refuses what can't be. Imports no torch; planning uses it too."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from checks import around, divisors, number_or_auto, one_of
from parallelism.schedules import SCHEDULES

CP_METHODS = ("ring", "ulysses", "allgather")
PP_SPLITS = ("auto", "llama3")  # ways to find parallel.pp_split; beside them, a list says it by hand
RANK_BYTES = 64 * 2**20  # what a forked rank of a small model takes: 8.2 GiB were measured for 128
BUILT = ("dp", "dp_shard", "tp", "cp", "pp")  # the axes that have a file here; any other degree must be 1


@dataclass
class ParallelConfig:
    """Keys of the `parallel` group that are no degree; `resolve_stages` fills in the last two."""

    sequence_parallel: bool
    reshard: bool
    cp_method: str
    pp_schedule: str
    pp_virtual: int | str  # stages of a rank
    pp_split: Any  # layers of each stage; a word before it is resolved

    @property
    def stages_per_rank(self) -> int:
        """pp_virtual, once it is a number."""
        assert isinstance(self.pp_virtual, int)
        return self.pp_virtual

    def __post_init__(self) -> None:
        one_of("parallel.cp_method", self.cp_method, CP_METHODS)
        one_of("parallel.pp_schedule", self.pp_schedule, SCHEDULES)
        number_or_auto("parallel.pp_virtual", self.pp_virtual, least=1)
        by_hand = isinstance(self.pp_split, list) and all(type(number) is int for number in self.pp_split)
        if not by_hand and self.pp_split not in PP_SPLITS:
            raise ValueError(
                f"parallel.pp_split={self.pp_split} is not one of {', '.join(PP_SPLITS)}, or a list of whole numbers "
                "such as [5,3]"
            )


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. ValueError: a degree can't be, or is above 1 where no layout is built yet."""

    dp: int
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees().items():
            if degree < 1:
                raise ValueError(f"{axis}={degree} must be at least 1")
            if degree > 1 and axis not in BUILT:
                raise ValueError(f"{axis}={degree} is not built yet; valid: {axis}=1 (today: {', '.join(BUILT)})")
        if self.dp % self.dp_shard:
            raise ValueError(
                f"dp_shard={self.dp_shard} does not divide dp={self.dp}; nearest valid: "
                f"dp_shard={around(self.dp_shard, divisors(self.dp))}, or dp={around(self.dp, self._multiples())}"
            )

    def _multiples(self) -> tuple[int, int]:
        below = self.dp // self.dp_shard * self.dp_shard
        return below, below + self.dp_shard

    def degrees(self) -> dict[str, int]:
        """Every key of the command line with its degree."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    def place(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis: pp is the outermost, tp the innermost, whose ranks are nearest to each other."""
        sizes = {
            "pp": self.pp,
            "replicate": self.dp // self.dp_shard,
            "shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
        place = {}
        for axis, size in reversed(sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def __str__(self) -> str:
        parts = [f"{axis}={degree}" for axis, degree in self.degrees().items() if degree > 1]
        return f"{' '.join(parts)}, {self.world_size} ranks" if parts else "one rank"


def resolve_layout(
    *, dp: int | str, num_devices: int, dp_shard: int | str = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1
) -> Layout:
    """The layout with its autos filled in. ValueError: see Layout.

    dp=auto is what is left of `num_devices`, at least 1; dp_shard=auto is all dp ranks.
    """
    for key, degree in (("dp", dp), ("dp_shard", dp_shard)):
        if isinstance(degree, str) and degree != "auto":
            raise ValueError(f"{key}={degree} is not a whole number or auto; valid: {key}=auto, {key}=1, {key}=2, ...")
    if isinstance(dp, str):
        dp = max(1, num_devices // max(1, prod((tp, pp, cp))))
    if isinstance(dp_shard, str):
        dp_shard = dp
    return Layout(dp=dp, dp_shard=dp_shard, tp=tp, pp=pp, cp=cp, ep=ep)


def check_model(
    layout: Layout,
    parallel: ParallelConfig,
    *,
    heads: int,
    hidden_dim: int,
    vocab_size: int,
    dropout: float,
) -> None:
    """ValueError where the layout can't split a model of these sizes."""
    if layout.dp * layout.cp > 1:
        _check_no_shard_is_empty(layout.tp, heads, {"model.ffn_dim": hidden_dim, "model.vocab_size": vocab_size})
    if heads % layout.tp:
        raise ValueError(
            f"tp={layout.tp} does not divide model.heads={heads}; "
            f"nearest valid: tp={around(layout.tp, divisors(heads))}"
        )
    local_heads = heads // layout.tp
    if parallel.cp_method == "ulysses" and local_heads % layout.cp:
        raise ValueError(
            f"cp={layout.cp} does not divide the {local_heads} heads of model.heads={heads} / tp={layout.tp}, which "
            f"parallel.cp_method=ulysses needs; nearest valid: cp={around(layout.cp, divisors(local_heads))}, or "
            "parallel.cp_method=ring"
        )
    if layout.cp > 1 and dropout > 0 and parallel.cp_method != "ulysses":
        raise ValueError(
            f"model.dropout={dropout} can't be had with cp={layout.cp} and parallel.cp_method={parallel.cp_method}, "
            "whose attention drops nothing; valid: model.dropout=0 or parallel.cp_method=ulysses"
        )


def check_seq_len(layout: Layout, parallel: ParallelConfig, seq_len: int, section: str = "batch") -> None:
    """ValueError where the layout can't split sequences of so many tokens, which the key seq_len of a section says."""
    factors = {"2 * cp" if parallel.cp_method != "ulysses" else "cp": layout.cp} if layout.cp > 1 else {}
    factors |= {"tp": layout.tp} if parallel.sequence_parallel and layout.tp > 1 else {}
    step = seq_len_step(layout, parallel)
    if seq_len % step:
        below, without_tp = seq_len // step * step, step // factors.get("tp", 1)
        raise ValueError(
            f"{section}.seq_len={seq_len} does not divide by {' * '.join(factors)} = {step}, which "
            f"{'cp' if layout.cp > 1 else 'parallel.sequence_parallel=true'} needs; "
            f"nearest valid: {section}.seq_len={around(seq_len, (below, below + step))}"
            + (", or parallel.sequence_parallel=false" if "tp" in factors and seq_len % without_tp == 0 else "")
        )


def check_cuda_pieces(layout: Layout, parallel: ParallelConfig, *, precision: str, head_dim: int) -> None:
    """ValueError where CUDA's flash kernel, which gives the log-sum-exp that ring and allgather need, can't run."""
    if layout.cp > 1 and parallel.cp_method != "ulysses" and (precision != "bf16" or head_dim % 8):
        raise ValueError(
            f"parallel.cp_method={parallel.cp_method} on GPUs needs precision=bf16 and heads whose width divides by 8, "
            f"not precision={precision} and width {head_dim}; valid: precision=bf16 model.head_dim=64, or "
            "parallel.cp_method=ulysses"
        )


def _check_no_shard_is_empty(tp: int, heads: int, sizes: dict[str, int]) -> None:
    """FSDP, which tp's parameters need once there is more data parallelism than one, can't carry an empty shard."""

    def last_is_empty(size: int, degree: int) -> bool:
        return (degree - 1) * -(-size // degree) >= size

    for key, size in sizes.items():
        if last_is_empty(size, tp):
            valid = [degree for degree in divisors(heads) if not last_is_empty(size, degree)]
            raise ValueError(
                f"tp={tp} cuts {key}={size} into pieces of {-(-size // tp)}, so the last rank has none, which can't be "
                f"with dp or cp above 1; nearest valid: tp={around(tp, valid)}"
            )


def seq_len_step(layout: Layout, parallel: ParallelConfig) -> int:
    """What the length of a sequence has to divide by: cp cuts it, in zigzag twice as often, and so do tp's ranks."""
    cuts = layout.cp * (2 if layout.cp > 1 and parallel.cp_method != "ulysses" else 1)
    return cuts * (layout.tp if parallel.sequence_parallel else 1)


def idle_settings(layout: Layout, parallel: ParallelConfig, dp_shard: int | str) -> list[str]:
    """What was asked for and does nothing on this layout, each with what would; `dp_shard` as it was asked for."""
    idle = []
    if dp_shard == "auto" and layout.dp == 1:
        idle.append("dp_shard=auto shards nothing at dp=1 (dp=auto counts a CPU as one device): try dp=2")
    if parallel.sequence_parallel and layout.tp == 1:
        idle.append("parallel.sequence_parallel=true does nothing at tp=1: try tp=2")
    if layout.pp > 1 and SCHEDULES[parallel.pp_schedule].most_stages is None and parallel.pp_virtual == 1:
        idle.append(
            f"parallel.pp_schedule={parallel.pp_schedule} at parallel.pp_virtual=1 is a schedule of one stage a rank: "
            "try parallel.pp_virtual=2"
        )
    if layout.pp == 1 and isinstance(parallel.pp_virtual, int) and parallel.pp_virtual > 1:
        idle.append(f"parallel.pp_virtual={parallel.pp_virtual} does nothing at pp=1: try pp=2")
    if not parallel.reshard and layout.dp_shard == 1:
        idle.append("parallel.reshard=false does nothing at dp_shard=1: try dp_shard=2")
    if layout.pp == 1 and parallel.pp_schedule != "1f1b":
        idle.append(f"parallel.pp_schedule={parallel.pp_schedule} does nothing at pp=1: try pp=2")
    if layout.pp == 1 and parallel.pp_split != "auto":
        idle.append(f"parallel.pp_split={parallel.pp_split} does nothing at pp=1: try pp=2")
    if layout.cp == 1 and parallel.cp_method != "ring":
        idle.append(f"parallel.cp_method={parallel.cp_method} does nothing at cp=1: try cp=2")
    return idle


def check_host_memory(layout: Layout, num_parameters: int, offload: Sequence[str], available: int | None) -> None:
    """ValueError where the ranks, all on this node's CPUs, need more bytes than are available; None: not known."""
    replicas = layout.dp // layout.dp_shard * layout.cp
    numbers = 6 if "optimizer" in offload else 4  # float32: weights and gradients, there once more, and two moments
    needed = layout.world_size * RANK_BYTES + 4 * numbers * num_parameters * replicas
    if available is not None and needed > available:
        raise ValueError(
            f"the layout ({layout}) needs about {needed / 2**30:.1f} GiB and this machine has "
            f"{available / 2**30:.1f} GiB free; valid: fewer ranks, or a smaller model"
        )


def node_warning(layout: Layout, local_world_size: int) -> str | None:
    """What to say where ranks that meet in every layer, those of tp and then those of cp, are not all on one node."""
    for name, degree in (("tp", layout.tp), ("cp * tp", layout.cp * layout.tp)):
        if local_world_size % degree:
            return (
                f"{name}={degree} crosses nodes of {local_world_size} ranks: every layer will wait for the network; "
                f"better: {name}={around(degree, divisors(local_world_size))}"
            )
    return None


def check_world_size(layout: Layout, world_size: int, started_by: str) -> None:
    """ValueError where the layout is not made for the ranks that `started_by` (torchrun, srun) has started."""
    if layout.world_size != world_size:
        others = layout.world_size // layout.dp
        step = others * layout.dp_shard
        fits = f"dp={world_size // others} or dp=auto" if world_size % step == 0 else f"a multiple of {step} ranks"
        raise ValueError(
            f"the layout ({layout}) does not fit the {world_size} ranks that {started_by} has started; valid: {fits}"
        )


def check_local_ranks(local_world_size: int, num_gpus: int, started_by: str) -> None:
    """ValueError where more ranks were started on this node than it has GPUs."""
    alone = started_by == "srun" and num_gpus == 1  # as srun --gpus-per-task=1 gives each rank its own to see
    if local_world_size > num_gpus and not alone:
        raise ValueError(
            f"{started_by} has started {local_world_size} ranks on this node, which has {num_gpus} GPUs; "
            f"valid: {num_gpus} ranks a node, or device=cpu"
        )


def check_gpus(layout: Layout, num_gpus: int, devices_per_node: int) -> None:
    """ValueError where this node has too few GPUs; the message holds the torchrun line for enough nodes."""
    if layout.world_size <= num_gpus:
        return
    per_node = max(n for n in range(1, max(1, devices_per_node) + 1) if layout.world_size % n == 0)
    nodes = layout.world_size // per_node
    raise ValueError(
        f"the layout ({layout}) needs {layout.world_size} GPUs and this node has {num_gpus}; with {devices_per_node} "
        f"GPUs a node it needs {nodes} nodes, on each of them: torchrun --nnodes {nodes} --nproc-per-node {per_node} "
        "--rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500 train.py (and your overrides); "
        "or add device=cpu to try the layout here; python plan.py with the same overrides looks at it without ranks"
    )
