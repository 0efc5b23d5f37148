"""A model laid out over ranks: all that the training loop ever sees of a layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from memory.footprint import BACKWARD, FORWARD
from models.gpt import GPT, IGNORED
from parallelism.cp import own_positions
from parallelism.dp import sum_gradients
from parallelism.halves import Gradients, Halves, MicroBatch, add_gradients, give_gradients, halve, take_gradients
from parallelism.layout import ParallelConfig, seq_len_step
from parallelism.mesh import Mesh
from parallelism.norm import scale_gradients, square_grad_norm
from parallelism.pp import Part, Pipeline
from parallelism.repeated import add_replicated_gradients, add_tied_gradients
from parallelism.stages import multiple_of
from parallelism.timeline import Span
from parallelism.vocabulary import VocabularyLoss, vocabulary_part


class DistributedModel:
    """A model laid out over ranks: every rank calls each method, with its own share of the data."""

    def __init__(
        self,
        stages: dict[int, GPT],
        trained: dict[int, nn.Module],
        mesh: Mesh,
        device: torch.device,
        parallel: ParallelConfig,
        replicated: dict[nn.Parameter, float],
        bf16: bool,
        hidden_dtype: torch.dtype,
    ) -> None:
        self.stages = stages  # hold the parameters, under their one-rank names
        self._trained = trained  # their forwards are what backward may follow
        self._mesh = mesh
        self._layout = mesh.layout
        self._place = mesh.layout.place(dist.get_rank())
        self._device = device
        self._parallel = parallel
        self._replicated = replicated  # over tp, with the weight of each rank's gradient in the sum of all
        self._bf16 = bf16
        self._pipeline = None
        if self._layout.pp > 1:
            config = next(iter(stages.values())).config
            cuts = self._layout.tp if parallel.sequence_parallel else 1
            first, end = vocabulary_part(config.vocab_size, self._place["tp"], self._layout.tp)
            logits_dtype = torch.bfloat16 if bf16 else hidden_dtype
            self._pipeline = Pipeline(
                trained,
                len(parallel.pp_split),
                mesh.weights["pp"].get_group(),
                device,
                schedule=parallel.pp_schedule,
                hidden=lambda x: torch.empty(len(x), x.shape[1] // cuts, config.dim, dtype=hidden_dtype, device=device),
                logits=lambda x: torch.empty(*x.shape, end - first, dtype=logits_dtype, device="meta"),
            )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under their one-rank names."""
        for stage in self.stages.values():
            yield from stage.named_parameters()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters."""
        return [parameter for _, parameter in self.named_parameters()]

    @property
    def data_part(self) -> tuple[int, int]:
        """Which part of each batch's sequences this rank takes, of how many."""
        return self._place["replicate"] * self._layout.dp_shard + self._place["shard"], self._layout.dp

    @property
    def dropout_part(self) -> int:
        """Ranks with the same number have to drop the same: those that hold the same activations."""
        part = (self.data_part[0] * self._layout.cp + self._place["cp"]) * self._layout.pp + self._place["pp"]
        return part * self._layout.tp + self._place["tp"] if self._parallel.sequence_parallel else part

    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Forward and backward; returns the loss in nats per valid token of the whole batch, over all ranks.

        The count of valid tokens is known before the first backward, so the gradients left in the parameters are those
        of that mean loss, whatever the number of ranks and micro-batches.
        """
        parts = [self._own_tokens(*micro_batch) for micro_batch in micro_batches]
        loss, _ = self._backward(parts, self._count(parts).clamp(min=1))
        self._add_repeated_gradients()
        return self._sum_over_data(loss)

    def step_in_halves(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, Halves | None]:
        """The same step and norms of its two halves (one gradient more is held); None: there are too few sequences."""
        cut = halve(micro_batches, multiple_of(self._layout, self._parallel) if self._pipeline else None)
        if cut is None:
            return self.step(micro_batches), None
        halves = [[self._own_tokens(*micro_batch) for micro_batch in half] for half in cut]
        tokens = torch.stack([self._count(parts) for parts in halves])
        loss, first = self._backward([*halves[0], *halves[1]], tokens.sum().clamp(min=1), len(halves[0]))
        second, squares = take_gradients(self.parameters()), []
        assert first.keys() == second.keys()
        for gradients in (first, second):
            give_gradients(gradients)
            self._add_repeated_gradients()
            squares.append(self._square_grad_norm())
        add_gradients(first)
        return self._sum_over_data(loss), Halves(torch.stack(squares), tokens)

    def _count(self, parts: Sequence[Part]) -> Tensor:
        """Valid tokens of the parts of all ranks."""
        return self._sum_over_data(torch.stack([(targets != IGNORED).sum() for _, targets, _ in parts]).sum())

    def _backward(self, parts: Sequence[Part], num_tokens: Tensor, half: int | None = None) -> tuple[Tensor, Gradients]:
        """Forward and backward; leaves gradients summed over data parallel ranks.

        Returns this rank's part of the loss, and the gradients of the first `half` parts, which are then taken off.
        """
        for stage in self.stages.values():
            stage.train()
        if self._pipeline is None:
            loss, first = self._accumulate(parts, num_tokens, half)
        else:
            with self._autocast():
                loss, first = self._pipeline.step(parts, num_tokens, half)
            loss = self._from_last_stage(loss)
        if any(isinstance(trained, DistributedDataParallel) for trained in self._trained.values()):
            # DDP reduces once a step: in its buckets the second half would overwrite the first.
            sum_gradients(first.values(), self._mesh.weights["replicas"].get_group())
        return loss, first

    def _accumulate(
        self, parts: Sequence[Part], num_tokens: Tensor, half: int | None = None
    ) -> tuple[Tensor, Gradients]:
        """Forward and backward of each micro-batch, one after the other; returns the sum of their losses."""
        total, first = torch.zeros((), device=self._device), Gradients()
        for number, (inputs, targets, positions) in enumerate(parts, 1):
            with self._sync(number == len(parts), number == half):
                with self._autocast(), record_function(FORWARD):
                    loss = self._trained[0](inputs, targets, positions) / num_tokens
                with record_function(BACKWARD):
                    loss.backward()
            total += loss.detach()
            if number == half:
                first = take_gradients(self.parameters())
        return total, first

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The loss in nats per valid token over all ranks' micro-batches, without dropout."""
        with self._inference():
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)  # loss and valid tokens
            parts = [self._own_tokens(*micro_batch) for micro_batch in micro_batches]
            for loss, (_, targets, _) in zip(self._forward(parts, with_targets=True), parts):
                sums += torch.stack((loss.double(), (targets != IGNORED).sum().double()))
        total, count = self._sum_over_data(self._from_last_stage(sums)).tolist()
        return total / count

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of the token after tokens (B, T), the same on every rank, without dropout."""
        last = tokens.shape[1] - 1
        # T has to divide; what comes later changes nothing before it.
        tokens = F.pad(tokens, (0, -tokens.shape[1] % seq_len_step(self._layout, self._parallel)))
        part = self._own_tokens(tokens, tokens)
        positions = part[2] if part[2] is not None else torch.arange(tokens.shape[1], device=self._device)
        # Lengths vary here, and each new one would be compiled.
        with self._inference(), torch.compiler.set_stance("force_eager"):
            logits = self._forward([part], with_targets=False)
        if not logits:
            vocab_size = next(iter(self.stages.values())).config.vocab_size
            return self._from_last_stage(torch.zeros(len(tokens), vocab_size, device=self._device))
        found = logits[0][:, positions == last].sum(1).float()  # (B, V); of cp's ranks one has it, the others add zero
        loss = self.stages[max(self.stages)].loss
        if isinstance(loss, VocabularyLoss):
            found = loss.gather(found)
        if self._layout.cp > 1:
            dist.all_reduce(found, group=self._mesh.cp.get_group())
        return self._from_last_stage(found.contiguous())

    def _forward(self, parts: Sequence[Part], with_targets: bool) -> list[Tensor]:
        """The summed loss of each micro-batch, or its logits; none on a rank without the last stage."""
        if self._pipeline is not None:
            return self._pipeline.forward(parts, with_targets)
        return [self.stages[0](x, targets if with_targets else None, positions) for x, targets, positions in parts]

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scales the gradient down to at most `max_norm`; returns the norm of the whole of it before that."""
        norm = self._square_grad_norm().sqrt()
        scale_gradients(self.parameters(), norm, max_norm)
        return norm

    def _square_grad_norm(self) -> Tensor:
        others = [self._mesh.weights["pp"].get_group()] if self._layout.pp > 1 else []
        twins = [parameter for name, parameter in self._tied_ends() if name == "head.weight"]
        return square_grad_norm(self.parameters(), twins=twins, others=others)

    def largest(self, *numbers: int) -> list[int]:
        """The largest of each number over all ranks: how they agree, say on a stop that has reached only some."""
        if dist.get_world_size() == 1:
            return list(numbers)
        largest = torch.tensor(numbers)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def _own_tokens(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's part of the sequences (B, T), and where it stands in them; all of it without cp."""
        if self._layout.cp == 1:
            return inputs, targets, None
        positions = self._own_positions(inputs.shape[1])
        return inputs[:, positions], targets[:, positions], positions

    @cache  # noqa: B019  (a model lives as long as its process)
    def _own_positions(self, seq_len: int) -> Tensor:
        method = self._parallel.cp_method
        return own_positions(seq_len, self._place["cp"], self._layout.cp, method).to(self._device)

    def watch(self, watched: bool) -> None:
        """Whether the next steps are to be timed for `timeline`."""
        if self._pipeline is not None:
            self._pipeline.clock.running = watched

    def timeline(self) -> list[Span]:
        """What the ranks of rank 0's pipeline did in the last step, in rank 0; empty elsewhere and without pp."""
        if self._pipeline is None:
            return []
        spans: list[list[Span]] = [[]] * dist.get_world_size()
        first = all(self._place[axis] == 0 for axis in ("replicate", "shard", "cp", "tp"))
        mine = self._pipeline.clock.spans(self._place["pp"]) if first else []
        dist.gather_object(mine, spans if dist.get_rank() == 0 else None)
        return [span for rank in spans for span in rank]

    def _sum_over_data(self, value: Tensor) -> Tensor:
        """The sum over the ranks that see different tokens."""
        for axis in (self._mesh.weights["replicas"], self._mesh.weights["shard"]):
            if axis.size() > 1:
                dist.all_reduce(value, group=axis.get_group())
        return value

    def _from_last_stage(self, value: Tensor) -> Tensor:
        """What the rank with the last stage has, on all ranks of a pipeline; theirs has to be zero."""
        if self._layout.pp > 1:
            dist.all_reduce(value, group=self._mesh.weights["pp"].get_group())
        return value

    @contextmanager
    def _sync(self, last: bool, half: bool) -> Iterator[None]:
        """Replicas reduce gradients once per step: in the backward of the last micro-batch.

        Shards do so in every one, or each rank would hold a whole gradient. Where memory is there for whole parameters,
        which stay for the step if they are not freed after the forward, it is for gradients too: then also once; see
        benchmarks/memory.py for what that gains.
        """
        trained = self._trained[0]
        if isinstance(trained, DistributedDataParallel) and not last:
            with trained.no_sync():
                yield
            return
        if isinstance(trained, FSDPModule):
            if self._parallel.reshard:
                trained.set_requires_all_reduce(last or half)
            else:
                trained.set_requires_gradient_sync(last or half)
                trained.set_reshard_after_backward(last or half)
        yield

    def _add_repeated_gradients(self) -> None:
        """Adds up what ranks compute of parameters that several have."""
        tied = [parameter for _, parameter in self._tied_ends()]
        if tied:
            add_tied_gradients(tied, self._mesh.weights["pp"].get_group())
        if self._replicated:
            add_replicated_gradients(self._replicated, self._mesh.weights["tp"].get_group())

    def _tied_ends(self) -> list[tuple[str, nn.Parameter]]:
        """Of the token embedding and the head, if they are one parameter that two stages hold, those of this rank."""
        if self._layout.pp == 1 or not next(iter(self.stages.values())).config.tie_embeddings:
            return []
        return [(name, p) for name, p in self.named_parameters() if name in ("embedding.weight", "head.weight")]

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)

    @contextmanager
    def _inference(self) -> Iterator[None]:
        for stage in self.stages.values():
            stage.eval()
        with self._autocast():
            yield
        for stage in self.stages.values():
            for unit in stage.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # what the forward keeps for a backward, of which there was none
