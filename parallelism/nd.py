"""The n-dimensional layout: the one place that knows in which order layouts are applied, and the only path to them.

`parallel=dp` is this with one degree above 1. What comes back, a DistributedModel, is all the loop ever sees.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from models.gpt import GPT, IGNORED
from parallelism.collectives import all_reduce
from parallelism.cp import apply_cp, gather_tokens, own_positions
from parallelism.dp import apply_dp
from parallelism.fsdp import apply_fsdp
from parallelism.layout import ParallelConfig, seq_len_step
from parallelism.materialise import materialise
from parallelism.mesh import Mesh
from parallelism.norm import clip_grad_norm
from parallelism.tp import apply_tp
from parallelism.vocabulary import VocabularyLoss

MicroBatch: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, both (B, T) int64; targets of -100 count nowhere


def parallelize(
    model: GPT,
    mesh: Mesh,
    device: torch.device,
    parallel: ParallelConfig,
    *,
    seed: int,
    precision: str = "fp32",
    compile: bool = False,
) -> "DistributedModel":
    """Lays the model out over the mesh and fills it with its initial weights: tp, cp, compile, then fsdp or dp.

    The model is on the meta device: no rank ever holds more of it than its shards and, while they are filled, one whole
    parameter. precision: fp32, or bf16 for bf16 matmuls on fp32 weights; under FSDP the residual stream is bf16 too,
    since its parameters are gathered so.
    """
    layout, weights = mesh.layout, mesh.weights
    partial_gradients: list[str] = []
    if layout.tp > 1:
        partial_gradients = apply_tp(model, weights["tp"], sequence_parallel=parallel.sequence_parallel)
    if layout.cp > 1:
        apply_cp(model, mesh.cp, method=parallel.cp_method)
    if compile:
        for block in model.blocks.values():
            block.compile()
    replicas = weights["replicas"].size()
    # The parameters of tp are DTensors, which DDP can't hold: there, plain data parallel is FSDP with a shard of one.
    # Its traffic is DDP's; it copies each parameter before use, and each gradient before it is reduced.
    sharded = layout.dp_shard > 1 or (replicas > 1 and layout.tp > 1)
    if sharded:
        axes = weights["shard"] if replicas == 1 else weights["replicas", "shard"]
        apply_fsdp(model, axes, reshard=parallel.reshard, bf16=precision == "bf16")
    materialise(model, device, seed)
    trained = apply_dp(model, weights["replicas"]) if replicas > 1 and not sharded else model
    return DistributedModel(model, trained, mesh, device, parallel, partial_gradients, bf16=precision == "bf16")


class DistributedModel:
    """A model laid out over ranks: every rank calls each method, with its own share of the data."""

    def __init__(
        self,
        model: GPT,
        trained: nn.Module,
        mesh: Mesh,
        device: torch.device,
        parallel: ParallelConfig,
        partial_gradients: list[str],
        *,
        bf16: bool,
    ) -> None:
        self.model = model  # holds the parameters, under their one-rank names
        self._trained = trained  # its forward is what backward may follow
        self._mesh = mesh
        self._layout = mesh.layout
        self._place = mesh.layout.place(dist.get_rank())
        self._device = device
        self._parallel = parallel
        self._partial = [parameter for name, parameter in model.named_parameters() if name in partial_gradients]
        self._bf16 = bf16

    @property
    def data_part(self) -> tuple[int, int]:
        """Which part of each batch's sequences this rank takes, of how many."""
        return self._place["replicate"] * self._layout.dp_shard + self._place["shard"], self._layout.dp

    @property
    def dropout_part(self) -> int:
        """Ranks with the same number have to drop the same: those that hold the same activations."""
        part = self.data_part[0] * self._layout.cp + self._place["cp"]
        return part * self._layout.tp + self._place["tp"] if self._parallel.sequence_parallel else part

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward; returns the loss in nats per valid token of the whole batch, over all ranks.

        The count of valid tokens is known before the first backward, so the gradients left in the parameters are those
        of that mean loss, whatever the number of ranks and micro-batches.
        """
        self.model.train()
        parts = [self._own_tokens(*micro_batch) for micro_batch in micro_batches]
        num_tokens = self._sum_over_data(sum((targets != IGNORED).sum() for _, targets, _ in parts))  # type: ignore[arg-type]
        num_tokens = num_tokens.clamp(min=1)
        total = torch.zeros((), device=self._device)
        for index, (inputs, targets, positions) in enumerate(parts):
            with self._sync(index == len(parts) - 1):
                with self._autocast():
                    loss = self._trained(inputs, targets, positions) / num_tokens
                loss.backward()
            total += loss.detach()
        self._add_partial_gradients()
        return self._sum_over_data(total)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss in nats per valid token over all ranks' micro-batches, without dropout."""
        with self._inference():
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # loss and valid tokens
            for micro_batch in micro_batches:
                inputs, targets, positions = self._own_tokens(*micro_batch)
                loss, num_tokens = self.model(inputs, targets, positions), (targets != IGNORED).sum()
                sums += torch.stack((loss.double(), num_tokens.double()))
        total, count = self._sum_over_data(sums).tolist()
        return total / count

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits (B, T, V) for tokens (B, T), the same on every rank, without dropout."""
        num_tokens = tokens.shape[1]
        # T has to divide; what comes later changes nothing before it.
        tokens = F.pad(tokens, (0, -num_tokens % seq_len_step(self._layout, self._parallel)))
        inputs, _, positions = self._own_tokens(tokens, tokens)
        # Lengths vary here, and each new one would be compiled.
        with self._inference(), torch.compiler.set_stance("force_eager"):
            logits = self.model(inputs, positions=positions)
        if isinstance(self.model.loss, VocabularyLoss):
            logits = self.model.loss.gather(logits)
        if self._layout.cp > 1:
            logits = gather_tokens(logits, 1, self._mesh.cp.get_group(), self._parallel.cp_method)
        return logits[:, :num_tokens]

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales the gradient down to at most `max_norm`; returns the norm of the whole of it before that."""
        return clip_grad_norm(self.model.parameters(), max_norm)

    def largest(self, number: int) -> int:
        """The largest number of all ranks: how they agree, say on a wish to stop that has reached only some of them."""
        if dist.get_world_size() == 1:
            return number
        numbers = torch.tensor(number)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return int(numbers)

    def _own_tokens(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's part of the sequences (B, T), and where it stands in them; all of it without cp."""
        if self._layout.cp == 1:
            return inputs, targets, None
        positions = own_positions(inputs.shape[1], self._place["cp"], self._layout.cp, self._parallel.cp_method)
        positions = positions.to(inputs.device)
        return inputs[:, positions], targets[:, positions], positions

    def _sum_over_data(self, value: Tensor) -> Tensor:
        """The sum over the ranks that see different tokens."""
        for axis in (self._mesh.weights["replicas"], self._mesh.weights["shard"]):
            if axis.size() > 1:
                dist.all_reduce(value, group=axis.get_group())
        return value

    @contextmanager
    def _sync(self, last: bool) -> Iterator[None]:
        """Replicas reduce gradients once per step: in the backward of the last micro-batch.

        Shards reduce in every one, or each rank would hold a whole gradient; parameters that were not freed after the
        forward stay for the whole step.
        """
        if isinstance(self._trained, DistributedDataParallel) and not last:
            with self._trained.no_sync():
                yield
            return
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_all_reduce(last)
            if not self._parallel.reshard:
                self.model.set_reshard_after_backward(last)
        yield

    def _add_partial_gradients(self) -> None:
        """Adds up, over tp and in one go, the gradients of which each rank has a part: see `apply_tp`."""
        if self._partial:
            shards = [parameter.grad.to_local() for parameter in self._partial]  # type: ignore[union-attr]
            whole = all_reduce(torch.cat([shard.flatten() for shard in shards]), self._mesh.weights["tp"].get_group())
            for shard, part in zip(shards, whole.split([shard.numel() for shard in shards])):
                shard.copy_(part.view_as(shard))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self.model.eval()
        with self._autocast():
            yield
        self.model.train()
        for unit in self.model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # what the forward keeps for a backward, of which there was none
