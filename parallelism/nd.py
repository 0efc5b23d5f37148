"""The n-dimensional layout: the one place that knows in which order layouts are applied, and the only path to them.

`parallel=dp` is this with one degree above 1. What comes back, a DistributedModel, is all the loop ever sees.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from models.gpt import GPT, IGNORED
from parallelism.dp import apply_dp

MicroBatch: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets, both (B, T) int64; targets of -100 count nowhere


def parallelize(model: GPT, mesh: DeviceMesh, *, precision: str = "fp32", compile: bool = False) -> "DistributedModel":
    """Lays the model out over the mesh: compile, then dp.

    The model is on this rank's device with its initial weights. precision: fp32, or bf16 for bf16 matmuls on fp32
    weights.
    """
    if compile:
        for block in model.blocks.values():
            block.compile()
    trained: nn.Module = model
    if mesh["dp"].size() > 1:
        trained = apply_dp(model, mesh["dp"])
    return DistributedModel(model, trained, mesh, precision)


class DistributedModel:
    """A model laid out over ranks: every rank calls each method, with its own share of the data."""

    def __init__(self, model: GPT, trained: nn.Module, mesh: DeviceMesh, precision: str) -> None:
        self.model = model  # holds the parameters, under their one-rank names
        self._trained = trained  # its forward is what backward may follow
        self._mesh = mesh
        self._device = next(model.parameters()).device
        self._bf16 = precision == "bf16"

    @property
    def data_part(self) -> tuple[int, int]:
        """Which part of each batch this rank takes, of how many."""
        return self._mesh["dp"].get_local_rank(), self._mesh["dp"].size()

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward; returns the loss in nats per valid token of the whole batch, over all ranks.

        The count of valid tokens is known before the first backward, so the gradients left in the parameters are those
        of that mean loss, whatever the number of ranks and micro-batches.
        """
        self.model.train()
        num_tokens = self._all_reduce(sum((targets != IGNORED).sum() for _, targets in micro_batches))  # type: ignore[arg-type]
        num_tokens = num_tokens.clamp(min=1)
        total = torch.zeros((), device=self._device)
        for index, (inputs, targets) in enumerate(micro_batches):
            with self._sync(index == len(micro_batches) - 1):
                with self._autocast():
                    loss = self._trained(inputs, targets) / num_tokens
                loss.backward()
            total += loss.detach()
        return self._all_reduce(total)

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss in nats per valid token over all ranks' micro-batches, without dropout."""
        with self._inference():
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # loss and valid tokens
            for inputs, targets in micro_batches:
                sums += torch.stack((self.model(inputs, targets).double(), (targets != IGNORED).sum().double()))
        loss, num_tokens = self._all_reduce(sums).tolist()
        return loss / num_tokens

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Next-token logits (B, T, V) for tokens (B, T), the same on every rank, without dropout."""
        # Lengths vary here, and each new one would be compiled.
        with self._inference(), torch.compiler.set_stance("force_eager"):
            return self.model(tokens)

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales the gradient down to at most `max_norm`; returns the norm of the whole of it before that."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def largest(self, flag: int) -> int:
        """The largest flag of all ranks: how they agree on a wish to stop that has reached only some of them."""
        if dist.get_world_size() == 1:
            return flag
        flags = torch.tensor(flag)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return int(flags)

    def _all_reduce(self, value: Tensor) -> Tensor:
        """The sum over the data parallel ranks."""
        if self._mesh["dp"].size() > 1:
            dist.all_reduce(value, group=self._mesh["dp"].get_group())
        return value

    def _sync(self, last: bool) -> AbstractContextManager[None]:
        """Gradients are reduced once per step: in the backward of the last micro-batch."""
        return nullcontext() if last or self._trained is self.model else self._trained.no_sync()  # type: ignore[operator]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        self.model.eval()
        with self._autocast():
            yield
        self.model.train()
