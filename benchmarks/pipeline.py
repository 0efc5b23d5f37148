"""The bubble of every pipeline schedule, measured where compute is equal on all stages, next to theory.

    python benchmarks/pipeline.py            four ranks, eight micro-batches: about half a minute
    python benchmarks/pipeline.py 8 16       eight ranks, sixteen micro-batches

Real ranks run the schedule through the pipeline that training uses; but a stage computes nothing. It sleeps for as long
in a forward as in either half of a backward, so that ranks may outnumber cores. What is left is the schedule and what
it costs to carry it out. Theory is in `parallelism/timeline.py`: two stages a rank where the schedule takes several.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallelism.launch import run_ranks
from parallelism.mesh import start_process_group
from parallelism.pp import Pipeline
from parallelism.schedules import SCHEDULES
from parallelism.slots import stages_of
from parallelism.timeline import Span, bubble, theoretical_bubble

SECONDS = 0.03  # of a slot
STEPS = 3


class SleepInBackward(torch.autograd.Function):
    """x itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(SECONDS)
        return gradient


class SleepingStage(nn.Module):
    """Sleeps once in forward, once for the gradient of its input and once for that of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Tokens (B, T) or hidden states (B, T, 1), to hidden states."""
        time.sleep(SECONDS)
        if not x.is_floating_point():
            x = x.float().unsqueeze(-1).requires_grad_()  # as if an embedding were trained
        return SleepInBackward.apply(x) * SleepInBackward.apply(self.weight)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Any number that has a gradient."""
        return hidden.sum()


def run_schedules(stop: Any, num_micro_batches: int, out: Path) -> int:
    """One rank: some steps of every schedule; rank 0 leaves the bubbles."""
    device = start_process_group("cpu", timeout_minutes=1)
    group = dist.group.WORLD
    assert group is not None
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    found: dict[str, float] = {}
    for name, schedule in SCHEDULES.items():
        v = schedule.usual_stages
        own = stages_of(dist.get_rank(), group.size(), v, schedule.v_shaped)
        pipeline = Pipeline(
            {stage: SleepingStage() for stage in own},
            v * group.size(),
            group,
            device,
            schedule=name,
            hidden=lambda x: torch.empty(*x.shape, 1),
            logits=lambda x: torch.empty(*x.shape, 1, device="meta"),
        )
        pipeline.clock.running = True
        bubbles = []
        for _ in range(1 + STEPS):
            pipeline.step([(tokens, tokens, None)] * num_micro_batches, torch.ones(()))
            by_rank: list[list[Span]] = [[]] * group.size()
            dist.all_gather_object(by_rank, pipeline.clock.spans(dist.get_rank()))
            bubbles.append(bubble([span for spans in by_rank for span in spans]))
        found[name] = statistics.median(bubbles[1:])  # the first step also makes connections
    if dist.get_rank() == 0:
        torch.save(found, out)
    dist.destroy_process_group()
    return 0


def measure(num_ranks: int, num_micro_batches: int) -> dict[str, tuple[float, float]]:
    """Of each schedule, the measured bubble and the theoretical."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bubbles.pt"
        assert run_ranks(run_schedules, num_micro_batches, out, num_ranks=num_ranks) == 0
        found = torch.load(out)
    return {
        name: (found[name], theoretical_bubble(name, num_ranks, num_micro_batches, schedule.usual_stages))
        for name, schedule in SCHEDULES.items()
    }


if __name__ == "__main__":
    num_ranks, num_micro_batches = map(int, sys.argv[1:3] or (4, 8))
    print(f"{num_ranks} ranks, {num_micro_batches} micro-batches, {SECONDS * 1000:.0f} ms a slot\n")
    print("| schedule | stages a rank | bubble measured | in theory |\n| --- | --- | --- | --- |")
    for name, (measured, theory) in measure(num_ranks, num_micro_batches).items():
        print(f"| `{name}` | {SCHEDULES[name].usual_stages} | {measured:.1%} | {theory:.1%} |")
