"""Ranks that take a step of some layout and tell what they sent and what they hold.

    python -m tests.parallelism.measure OUT '{"dp": 2}' llama 12 '{}'     degrees, model, micro-batch, options

What was sent is read off torch's profiler, which sees every collective that reaches the process group, whoever issued
it; what is held is the memory behind the tensors.
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from models.gpt import GPT
from parallelism.launch import run_ranks
from parallelism.layout import Layout
from parallelism.mesh import make_mesh, start_process_group
from parallelism.nd import parallelize
from parallelism.stop import Stop
from tests.cases import MODELS, Case
from tests.parity import SEED, own_micro_batches

# Each collective under the names that torch gives it, and how to read the elements of the whole tensor off its inputs.
# An all-to-all whose parts are then added is a reduce-scatter.
GATHERED: dict[str, Callable[[list[int], int], int]] = {
    "c10d::_allgather_base_": lambda sizes, num_ranks: sizes[0],
    "_c10d_functional::all_gather_into_tensor": lambda sizes, num_ranks: sizes[0] * num_ranks,
}
SCATTERED: dict[str, Callable[[list[int], int], int]] = {
    "c10d::_reduce_scatter_base_": lambda sizes, num_ranks: sizes[1],
    "_c10d_functional::all_to_all_single": lambda sizes, num_ranks: sizes[0],
}


def measure(stop: Stop, case: Case, out: Path) -> int:
    """One rank: two steps and an evaluation; rank 0 writes what it saw of the second step and the evaluation."""
    device = start_process_group("cpu", timeout_minutes=1)
    with torch.device("meta"):
        whole = GPT(MODELS[case.model])
    parallel, options = case.settings()
    model = parallelize(whole, make_mesh(case.layout, device, 1), device, parallel, seed=SEED, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.step(own_micro_batches(case, model, 0))
    optimizer.step()
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        model.step(own_micro_batches(case, model, 1))
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen_in_evaluation:
        model.evaluate(own_micro_batches(case, model, 1))
    num_ranks = case.layout.tp if case.layout.tp > 1 else case.layout.cp
    results = {**traffic(seen, num_ranks), **held_bytes(model.parameters(), optimizer)}
    results |= {f"{kind}_in_evaluation": total for kind, total in traffic(seen_in_evaluation, num_ranks).items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.destroy_process_group()
    return 0


def traffic(seen: profile, num_ranks: int) -> dict[str, int]:
    """Elements that collectives of each kind have worked on: of the whole tensor, not of a rank's part of it.

    `num_ranks`: on the axis of functional gathers, those of tp or cp. Single numbers (token counts, losses) are left
    out. What one rank sends to another is `sent` there and `received` here.
    """
    totals = {"gathered": 0, "scattered": 0, "reduced": 0, "sent": 0, "received": 0}
    for event in seen.events() or []:
        sizes = [torch.Size(shape).numel() for shape in event.input_shapes]
        if event.name in GATHERED:
            totals["gathered"] += GATHERED[event.name](sizes, num_ranks)
        elif event.name in SCATTERED:
            totals["scattered"] += SCATTERED[event.name](sizes, num_ranks)
        elif event.name in ("gloo:send", "gloo:recv"):
            totals["sent" if event.name == "gloo:send" else "received"] += sizes[0]
        elif event.name == "gloo:all_reduce" and sizes[0] > 1:
            totals["reduced"] += sizes[0]
        if event.name == "c10d::_reduce_scatter_base_":  # which gloo runs as an all-reduce
            totals["reduced"] -= sizes[1]
    return totals


def held_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The memory behind this rank's parameters, gradients and optimizer state; replicated parameters apart."""
    sharded, replicated = 0, 0
    for parameter in parameters:
        moments = [value for value in optimizer.state[parameter].values() if value.dim() > 0]
        size = sum(local_bytes(tensor) for tensor in (parameter, parameter.grad, *moments) if tensor is not None)
        if isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements):
            sharded += size
        else:
            replicated += size
    return {"sharded_bytes": sharded, "replicated_bytes": replicated}


def local_bytes(tensor: Tensor) -> int:
    """Of this rank's part."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


if __name__ == "__main__":
    degrees, options = (json.loads(sys.argv[index]) for index in (2, 5))
    case = Case(Layout(**degrees), sys.argv[3], int(sys.argv[4]), options)
    sys.exit(run_ranks(measure, case, Path(sys.argv[1]), num_ranks=case.layout.world_size))
