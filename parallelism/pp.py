"""Pipeline parallel: each rank of the pp axis holds some of the blocks, and activations travel from one to the next.

A model is cut into p * v stages of consecutive blocks; `stages.py` says how many each has and `slots.py` which rank has
it. In which order a rank computes its stages' micro-batches is in `schedules.py`; torch's pipeline runtime carries that
out.

Shapes as in models/gpt.py; between stages travel hidden states (B, t, C), where t is a rank's share of T under context
and sequence parallelism.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import _Replicate
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from models.gpt import GPT
from parallelism.schedules import SCHEDULES
from parallelism.slots import Slot, rank_of
from parallelism.timeline import Span

KINDS = {kind.value: kind for kind in _ComputationType}
Part = tuple[Tensor, Tensor, Tensor | None]  # a micro-batch's inputs, targets and positions


def cut_stage(model: GPT, counts: Sequence[int], stage: int) -> GPT:
    """The stage of a model on the meta device: its blocks, and the ends if they are its own."""
    part = copy.deepcopy(model)
    first = sum(counts[:stage])
    for name in list(part.blocks):
        if not first <= int(name) < first + counts[stage]:
            del part.blocks[name]
    if stage > 0:
        part.embedding = part.position_embedding = None
    if stage < len(counts) - 1:
        part.norm = part.head = None
    return part


class Pipeline:
    """The stages of this rank, and how micro-batches go through those of all ranks."""

    def __init__(
        self,
        stages: dict[int, nn.Module],
        num_stages: int,
        group: ProcessGroup,
        device: torch.device,
        *,
        schedule: str,
        hidden: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """For inputs (B, T/cp), `hidden` gives an empty tensor like the hidden states between stages, and `logits` one
        like what the last stage of this rank gives."""
        self.stages = stages
        self.num_stages = num_stages
        self.group = group
        self.device = device
        self.schedule = SCHEDULES[schedule]
        self.hidden = hidden
        self.logits = logits
        self.watched = False  # whether a GPU waits for each slot, so that its times are true
        self.spans: list[Span] = []  # what this rank did in the last step, on the node's clock
        self._num_tokens = torch.zeros(())  # by which the loss of the step is divided
        self._runtime: tuple[Any, Any] = (None, None)  # of the last step, and for which micro-batches it is

    @property
    def has_last(self) -> bool:
        """Whether this rank has the logits and the loss."""
        return self.num_stages - 1 in self.stages

    def step(self, parts: Sequence[Part], num_tokens: Tensor) -> Tensor:
        """Forward and backward of all micro-batches; the loss over num_tokens where the last stage is, else 0."""
        inputs, targets = (torch.cat([part[index] for part in parts]) for index in (0, 1))  # type: ignore[misc]
        positions = parts[0][2] if parts[0][2] is not None else torch.arange(inputs.shape[1], device=self.device)
        self.spans = []
        self._num_tokens = num_tokens
        shape = len(parts), parts[0][0].shape
        if self._runtime[1] != shape:
            self._runtime = self._make_runtime(len(parts), parts[0][0]), shape
        runtime, _ = self._runtime
        losses: list[Tensor] = []
        tokens = (inputs,) if 0 in self.stages else ()
        target = targets if self.has_last else None
        runtime.step(*tokens, positions=positions, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)

    def forward(self, part: Part, with_targets: bool) -> Tensor | None:
        """One micro-batch, without gradients: the summed loss, or logits, where the last stage is, else None."""
        inputs, targets, positions = part
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=self.device)
        y = inputs
        for stage, module in sorted(self.stages.items()):
            if stage > 0 and stage - 1 not in self.stages:
                y = self.hidden(inputs)
                dist.recv(y, group=self.group, group_src=self._rank_of(stage - 1))
            y = module(y, targets if with_targets and stage == self.num_stages - 1 else None, positions)
            if stage < self.num_stages - 1 and stage + 1 not in self.stages:
                dist.send(y.contiguous(), group=self.group, group_dst=self._rank_of(stage + 1))
        return y if self.has_last else None

    def _rank_of(self, stage: int) -> int:
        return rank_of(stage, self.group.size(), self.schedule.v_shaped)

    def _watch(self, stage: Any) -> None:
        """Notes when the stage's slots start and end: see `watched`."""
        forward, backward, weights = (
            stage.forward_one_chunk,
            stage.backward_one_chunk,
            stage.backward_weight_one_chunk,
        )

        def timed(kind: str, work: Callable[..., Any], micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            begun = self._now()
            result = work(micro_batch, *args, **kwargs)
            self.spans.append(Span(self.group.rank(), Slot(stage.stage_index, kind, micro_batch), begun, self._now()))
            return result

        def either_backward(micro_batch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
            kind = "B" if full_backward else "I"
            return timed(kind, backward, micro_batch, *args, full_backward=full_backward, **kwargs)

        stage.forward_one_chunk = partial(timed, "F", forward)
        stage.backward_one_chunk = either_backward
        stage.backward_weight_one_chunk = partial(timed, "W", weights)

    def _now(self) -> float:
        """Seconds, on a clock that all ranks of a node share."""
        if self.watched and self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    def _make_runtime(self, num_micro_batches: int, inputs: Tensor) -> Any:
        """Torch's runtime for so many micro-batches like `inputs`, (B, T/cp)."""
        stages = []
        for number, module in sorted(self.stages.items()):
            hidden = self.hidden(inputs).requires_grad_()  # a gradient comes back for it
            taken = inputs if number == 0 else hidden
            given = self.logits(inputs).requires_grad_() if number == self.num_stages - 1 else hidden
            stage = PipelineStage(module, number, self.num_stages, self.device, taken, given, group=self.group)
            self._watch(stage)
            stages.append(stage)
        last = self.stages.get(self.num_stages - 1)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            assert last is not None
            model = last.module if isinstance(last, nn.parallel.DistributedDataParallel) else last
            return model.loss(logits, targets) / self._num_tokens  # type: ignore[operator]

        runtime = _PipelineScheduleRuntime(
            stages,
            num_micro_batches,
            loss_fn=loss,
            kwargs_chunk_spec={"positions": _Replicate},
            scale_grads=False,  # the loss is divided by the whole batch's token count already
        )
        orders = self.schedule.orders(self.group.size(), num_micro_batches, len(self.stages))
        actions = {
            rank: [_Action(slot.stage, KINDS[slot.kind], slot.micro_batch) for slot in order]
            for rank, order in enumerate(orders)
        }
        runtime._prepare_schedule_with_comms(actions)  # type: ignore[arg-type]
        return runtime
