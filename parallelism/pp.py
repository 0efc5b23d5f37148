"""Pipeline parallel: each rank of the pp axis holds some of the blocks, and activations travel from one to the next.

A model is cut into p * v stages of consecutive blocks; `stages.py` says how many each has and `slots.py` which rank has
it. In which order a rank computes its stages' micro-batches is in `schedules.py`; torch's pipeline runtime carries that
out.

Beside the activations that a schedule keeps, each rank holds, for every micro-batch and stage, what it receives and
what it sends in a step: about 4 m v hidden states. Torch has no public way to run an order of one's own; the private
names below are those of torch 2.11 and 2.13.

Shapes as in models/gpt.py; between stages travel hidden states (B, t, C), where t is a rank's share of T under context
and sequence parallelism.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import _Replicate
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.profiler import record_function

from memory.footprint import FORWARD
from models.gpt import GPT
from parallelism.clock import Clock
from parallelism.halves import Gradients, take_gradients
from parallelism.schedules import SCHEDULES
from parallelism.slots import Slot, rank_of

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


class TimedStage(PipelineStage):
    """Torch's stage, with a clock; and one that can give away the gradients of its first micro-batches."""

    def __init__(self, clock: Clock, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = clock
        # How many those are. In two runs, of half the micro-batches each, the pipeline would fill and drain once more.
        self.half: int | None = None  # all schedules have backwards in the order of micro-batches
        self.first = Gradients()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What torch 2.11 connects ranks by; where a pipeline turns back it would have a rank send to itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.time(Slot(self.stage_index, "F", fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        with self.clock.time(Slot(self.stage_index, "B" if full_backward else "I", bwd_chunk_id)):
            result = super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward and bwd_chunk_id + 1 == self.half:
            self._take_first()
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.clock.time(Slot(self.stage_index, "W", bwd_chunk_id)):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            _add_up_in_float32(self.submod)
        if bwd_chunk_id + 1 == self.half:
            self._take_first()

    def _take_first(self) -> None:
        parameters = list(self.submod.parameters())
        if isinstance(self.submod, FSDPModule):  # whose parameters now are whole
            parameters = _reduce(self.submod)
        self.first = take_gradients(parameters)


def _add_up_in_float32(stage: nn.Module) -> None:
    """Has FSDP take over gradients, as it does after a whole backward: else micro-batches add up in bf16."""
    for parameter in (parameter for group in _fsdp_groups(stage) for parameter in group.fsdp_params):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()


def _reduce(stage: Any) -> list[nn.Parameter]:
    """Has FSDP reduce gradients as torch does after the last micro-batch, but keep the parameters gathered.

    Returns the shards that have the gradients.
    """
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(False)
    stage.set_requires_gradient_sync(True)
    groups = _fsdp_groups(stage)
    for group in groups:
        group.post_backward()
    _fsdp_state(stage)._root_post_backward_final_callback()
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def _fsdp_state(unit: Any) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def _fsdp_groups(stage: nn.Module) -> list[Any]:
    """Of each unit the group of its parameters; torch 2.11 has one, or none, where later ones have a list."""
    states = [_fsdp_state(unit) for unit in stage.modules() if isinstance(unit, FSDPModule)]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for those in groups for group in those if group]


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
        self.stages = dict(sorted(stages.items()))
        self.num_stages = num_stages
        self.group = group
        self.device = device
        self.schedule = SCHEDULES[schedule]
        self.hidden = hidden
        self.logits = logits
        self.clock = Clock(device)
        self._num_tokens = torch.zeros(())  # by which the loss of the step is divided
        self._timed: list[TimedStage] = []
        self._runtime: Any = None  # of the last step, for micro-batches of `_shape`
        self._shape: Any = None

    @property
    def has_last(self) -> bool:
        """Whether this rank has the logits and the loss."""
        return self.num_stages - 1 in self.stages

    def step(self, parts: Sequence[Part], num_tokens: Tensor, half: int | None = None) -> tuple[Tensor, Gradients]:
        """Forward and backward of all micro-batches; the loss over num_tokens where the last stage is, else 0.

        Also the gradients of the first `half` micro-batches, which then are not in the parameters.
        """
        inputs, targets = (torch.cat([part[index] for part in parts]) for index in (0, 1))  # type: ignore[misc]
        self._num_tokens = num_tokens
        shape = len(parts), parts[0][0].shape
        if shape != self._shape:
            self._runtime, self._shape = None, shape  # its buffers go before the new ones come
            self._runtime = self._make_runtime(len(parts), parts[0][0])
        for stage in self._timed:
            stage.half = half
        losses: list[Tensor] = []
        tokens = (inputs,) if 0 in self.stages else ()
        target = targets if self.has_last else None
        self.clock.restart(self.group)
        self._runtime.step(
            *tokens, positions=self._positions(parts[0]), target=target, losses=losses, return_outputs=False
        )
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)
        first = Gradients(pair for stage in self._timed for pair in stage.first.items())
        for stage in self._timed:
            stage.half, stage.first = None, Gradients()  # or they would be held to the next step
        return loss, first

    def forward(self, parts: Sequence[Part], with_targets: bool) -> list[Tensor]:
        """Micro-batches, without gradients: each one's summed loss, or logits, where the last stage is, else none.

        As many as there are ranks are on their way at a time.
        """
        size = self.group.size()
        rounds = (parts[first : first + size] for first in range(0, len(parts), size))
        return [result for some in rounds for result in self._forward_round(some, with_targets)]

    def _forward_round(self, parts: Sequence[Part], with_targets: bool) -> list[Tensor]:
        """All go through a stage before any goes through the next of the same rank."""
        last = self.num_stages - 1
        sends: list[dist.Work | None] = []
        here = [part[0] for part in parts]
        for stage, module in self.stages.items():
            arrived, here = here, []
            for (inputs, targets, _), own in zip(parts, arrived):
                x = own
                if stage > 0 and stage - 1 not in self.stages:
                    x = self.hidden(inputs)
                    dist.recv(x, group=self.group, group_src=self._rank_of(stage - 1))
                y = module(x, targets if with_targets and stage == last else None, self._positions(parts[0]))
                if stage < last and stage + 1 not in self.stages:
                    y = y.contiguous()
                    sends.append(dist.isend(y, group=self.group, group_dst=self._rank_of(stage + 1)))
                    y = inputs  # what goes into this rank's next stage is another rank's
                here.append(y)
        for send in sends:
            assert send is not None
            send.wait()
        return here if self.has_last else []

    def _rank_of(self, stage: int) -> int:
        return rank_of(stage, self.group.size(), self.schedule.v_shaped)

    def _positions(self, part: Part) -> Tensor:
        inputs, _, positions = part
        return torch.arange(inputs.shape[1], device=self.device) if positions is None else positions

    def _make_runtime(self, num_micro_batches: int, inputs: Tensor) -> Any:
        """Torch's runtime for so many micro-batches like `inputs`, (B, T/cp)."""
        stages: list[TimedStage] = []
        for number, module in self.stages.items():
            hidden = self.hidden(inputs).requires_grad_()  # a gradient comes back for it
            taken = inputs if number == 0 else hidden
            given = self.logits(inputs).requires_grad_() if number == self.num_stages - 1 else hidden
            shape = (module, number, self.num_stages, self.device, taken, given)
            stages.append(TimedStage(self.clock, *shape, group=self.group))
        self._timed = stages
        last = self.stages.get(self.num_stages - 1)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            assert last is not None
            model = last.module if isinstance(last, nn.parallel.DistributedDataParallel) else last
            with record_function(FORWARD):
                found = model.loss(logits, targets) / self._num_tokens  # type: ignore[operator]
            self.clock.extend()  # the runtime asks for the loss after the last stage's forward
            return found

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
