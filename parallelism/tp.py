"""Tensor parallel: each rank holds some heads of every attention and some columns of every MLP, and sees all tokens.

Megatron-LM's plan (Shoeybi et al. 2019, section 3). The matrices that read the residual stream (q, k, v, up, gate) are
split by rows of their weight, those that write to it (out, down) by columns, so that ranks meet once in the forward and
once in the backward of each attention and MLP. The vocabulary is split too: no rank ever holds all logits.

    enter  every rank gets the whole x             copy (its gradient is summed)
    leave  ranks' partial results become one       sum over the ranks

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) each rank holds, between those regions, T/tp tokens
of the residual stream: enter gathers them and leave scatters the sum, the same bytes in other collectives.

Parameters are DTensors over the axis, for norms and checkpoints; the forward works on their local shards. Shapes as in
models/gpt.py, with t = T/tp tokens under sequence parallelism and t = T without.
"""

from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from models.config import ModelConfig
from models.gpt import GPT, Block
from parallelism.collectives import Copy, Gather, Scatter, Sum
from parallelism.vocabulary import VocabularyLoss, vocabulary_part

TIME = 1  # the dimension of tokens in (B, T, C)


@dataclass(frozen=True)
class Region:
    """The way into, and out of, the work that the ranks of the tp axis share."""

    mesh: DeviceMesh
    sequence_parallel: bool

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the axis."""
        return self.mesh.get_group()

    @property
    def rank(self) -> int:
        """This rank's place on the axis."""
        return self.mesh.get_local_rank()

    def enter(self, x: Tensor) -> Tensor:
        """(B, t, C) to (B, T, C), the same on every rank."""
        return Gather.apply(x, TIME, self.group) if self.sequence_parallel else Copy.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """(B, T, C), a partial sum, to the (B, t, C) of the whole sum."""
        return Scatter.apply(x, TIME, self.group) if self.sequence_parallel else Sum.apply(x, self.group)

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.mesh.size()

    def place(self, parameter: Tensor, placement: Placement) -> nn.Parameter:
        """The parameter as a DTensor, of which this rank keeps its shard or, if replicated, all."""
        return nn.Parameter(distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=None))


def apply_tp(model: GPT, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> dict[str, bool]:
    """Splits the model, in place, over a mesh of one axis whose size divides the number of heads.

    Returns the names of the replicated parameters, and whether each rank's gradient of them, after backward, is a
    partial sum that has still to be added over the axis: in modules that say so (`partial`), since each rank works with
    other tokens or rows. In the others all ranks have the same gradient.
    """
    region = Region(mesh, sequence_parallel)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        _split_block(block, region, model.config)
    if model.embedding is not None:
        model.embedding = VocabularyEmbedding(model.embedding, region)
    if model.position_embedding is not None:
        model.position_embedding = PositionEmbedding(model.position_embedding, region)
    if model.norm is not None:
        model.norm = EnteringNorm(model.norm, region)
    if model.head is not None:
        model.head = ColumnLinear(model.head, region)
        model.loss = VocabularyLoss(region.group, model.config.vocab_size)
    model.tie_weights()
    return {
        f"{prefix}.{name}": getattr(module, "partial", False)
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor) and parameter.placements == (Replicate(),)
    }


def _split_block(block: Block, region: Region, config: ModelConfig) -> None:
    attention, mlp = block.attention, block.mlp
    block.attention_norm, block.mlp_norm = (
        EnteringNorm(norm, region) for norm in (block.attention_norm, block.mlp_norm)
    )
    rows = _kv_rows(config, region) if config.num_kv_heads % region.size else None
    attention.q, attention.out = ColumnLinear(attention.q, region), RowLinear(attention.out, region)
    attention.k, attention.v = (ColumnLinear(linear, region, rows) for linear in (attention.k, attention.v))
    if config.dropout and not region.sequence_parallel:
        attention.core = OwnDropout(attention.core, region.rank)
    mlp.up, mlp.down = ColumnLinear(mlp.up, region), RowLinear(mlp.down, region)
    mlp.gate = ColumnLinear(mlp.gate, region) if mlp.gate is not None else None


def _kv_rows(config: ModelConfig, region: Region) -> slice | list[int]:
    """The rows of k and v that this rank's query heads need, where tp does not divide the number of kv heads.

    Every rank then holds all of k and v. 24 heads on 6 kv heads: with tp=12 a rank's 2 queries share one kv head. With
    tp=4 rank 0's 6 queries need heads 0, 0, 0, 0, 1, 1: no even groups, so each query gets its kv head listed.
    """
    num_local, group_size = config.heads // region.size, config.heads // config.num_kv_heads
    needed = [head // group_size for head in range(region.rank * num_local, (region.rank + 1) * num_local)]
    if len({needed.count(head) for head in needed}) == 1:
        return slice(needed[0] * config.head_dim, (needed[-1] + 1) * config.head_dim)
    return [row for head in needed for row in range(head * config.head_dim, (head + 1) * config.head_dim)]


class ColumnLinear(nn.Linear):
    """Some of the output features: (B, T, C) to (B, T, C/tp). With `rows`, those, of a weight that all ranks hold."""

    def __init__(self, whole: nn.Linear, region: Region, rows: slice | list[int] | None = None) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, device="meta")
        self.rows = rows
        self.partial = rows is not None
        placement = Shard(0) if rows is None else Replicate()
        self.weight = region.place(whole.weight, placement)
        if whole.bias is not None:
            self.bias = region.place(whole.bias, placement)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local(self.weight), local(self.bias)
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return F.linear(x, weight, bias)


class RowLinear(nn.Linear):
    """Some of the input features, (B, T, F/tp), to the whole output, (B, t, C); the bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, region: Region) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, device="meta")
        self.region = region
        self.partial = region.sequence_parallel
        self.weight = region.place(whole.weight, Shard(1))
        if whole.bias is not None:
            self.bias = region.place(whole.bias, Replicate())

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(F.linear(x, local(self.weight)))
        return y if self.bias is None else y + local(self.bias).type_as(y)


class EnteringNorm(nn.Module):
    """A norm, on this rank's tokens, behind which the shared work begins: (B, t, C) to (B, T, C)."""

    def __init__(self, whole: nn.Module, region: Region) -> None:
        super().__init__()
        assert isinstance(whole, nn.LayerNorm | nn.RMSNorm)
        self.region = region
        self.partial = region.sequence_parallel
        self.shape, self.eps = whole.normalized_shape, whole.eps
        self.layer_norm = isinstance(whole, nn.LayerNorm)
        self.weight = region.place(whole.weight, Replicate())
        bias = whole.bias if isinstance(whole, nn.LayerNorm) else None
        self.bias = None if bias is None else region.place(bias, Replicate())

    def forward(self, x: Tensor) -> Tensor:
        if self.layer_norm:
            assert self.eps is not None
            y = F.layer_norm(x, self.shape, local(self.weight), local(self.bias), self.eps)
        else:
            y = F.rms_norm(x, self.shape, local(self.weight), self.eps)
        if torch.is_autocast_enabled(x.device.type):  # the matrices behind would cast it anyway: move half the bytes
            y = y.to(torch.get_autocast_dtype(x.device.type))
        return self.region.enter(y)


class VocabularyEmbedding(nn.Embedding):
    """Some of the vocabulary's rows; a token of another rank's is zero here, and the ranks' results are added."""

    def __init__(self, whole: nn.Embedding, region: Region) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, device="meta")
        self.region = region
        self.first, self.end = vocabulary_part(whole.num_embeddings, region.rank, region.size)
        self.weight = region.place(whole.weight, Shard(0))

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local(self.weight)
        if not weight.shape[0]:
            weight = F.pad(weight, (0, 0, 0, 1))  # a rank without entries still takes part
        others = (tokens < self.first) | (tokens >= self.end)  # (B, T)
        index = (tokens - self.first).clamp(0, weight.shape[0] - 1)
        return self.region.leave(F.embedding(index, weight).masked_fill(others.unsqueeze(-1), 0.0))  # (B, t, C)


class PositionEmbedding(nn.Embedding):
    """Learned positions, the same on every rank, looked up for this rank's tokens: (T,) to (t, C)."""

    def __init__(self, whole: nn.Embedding, region: Region) -> None:
        super().__init__(whole.num_embeddings, whole.embedding_dim, device="meta")
        self.region = region
        self.partial = region.sequence_parallel
        self.weight = region.place(whole.weight, Replicate())

    def forward(self, positions: Tensor) -> Tensor:
        if self.region.sequence_parallel:
            positions = positions.chunk(self.region.size)[self.region.rank]
        return F.embedding(positions, local(self.weight))


class OwnDropout(nn.Module):
    """Attention whose dropout differs between ranks, which hold different heads but draw from one seed."""

    def __init__(self, core: nn.Module, rank: int) -> None:
        super().__init__()
        self.core, self.rank = core, rank

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As AttentionCore."""
        if not self.training:
            return self.core(q, k, v)
        seed = int(torch.randint(2**62, ())) + self.rank
        with torch.random.fork_rng([q.device] if q.is_cuda else []):
            torch.manual_seed(seed)
            return self.core(q, k, v)


@overload
def local(parameter: Tensor) -> Tensor: ...
@overload
def local(parameter: None) -> None: ...
def local(parameter: Tensor | None) -> Tensor | None:
    """This rank's shard of a DTensor, through which gradients flow back to it; None stays None."""
    return None if parameter is None else _Local.apply(parameter)


class _Local(Function):
    """DTensor.to_local, also right for uneven shards: torch 2.11 mistakes their gradients' shape, and gathers them."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        ctx.shape, ctx.stride = parameter.shape, parameter.stride()
        shard = parameter.to_local()
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        whole = {"run_check": False, "shape": ctx.shape, "stride": ctx.stride}
        return DTensor.from_local(gradient.contiguous(), ctx.mesh, ctx.placements, **whole)
