"""What each way to save memory saves, and what it costs, against none of them.

    python benchmarks/memory.py           about ten minutes on two cores; draws benchmarks/memory.png
    python benchmarks/memory.py 21        rounds of steps, 9 otherwise

All ways take a step of the same batch in turn, in one process, or in two where parameters are sharded, so that a noisy
machine disturbs all alike; the ratio is the median over rounds. The peak is what the rank's device holds at most in a
step, beside what has moved to host memory, which is the same memory on a CPU.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would say when it starts and stops

from training.job import Job, make_job  # noqa: E402  (the path comes first)

WARMUP = 2  # rounds that are not counted
MODEL = "model.layers=16 model.dim=256 model.context=256 batch.seq_len=256 batch.tokens=4096"
SETTINGS = [*MODEL.split(), "data=synthetic", "device=cpu", "precision=fp32"]
FSDP = "parallel=fsdp dp=2"
WAYS = {
    1: {
        "none": "",
        "memory.ckpt=full": "memory=ckpt",
        "memory.ckpt=sqrt": "memory.ckpt=sqrt",
        "memory.ckpt=sqrt_deep": "memory.ckpt=sqrt_deep",
        "memory.ckpt=selective": "memory.ckpt=selective",
        "memory.offload=[optimizer]": "memory=offload",
        "memory.offload=[activations]": "memory.offload=[activations]",
        "memory.micro_batch=2": "memory.micro_batch=2",
        "memory=[ckpt,accum], both offloaded": "memory=[ckpt,accum] memory.offload=[optimizer,activations]",
    },
    2: {
        FSDP: FSDP,
        f"{FSDP} memory.offload=[params]": f"{FSDP} memory.offload=[params]",
        f"{FSDP} memory.micro_batch=1": f"{FSDP} memory.micro_batch=1",
        f"{FSDP} memory.micro_batch=1 parallel.reshard=false": f"{FSDP} memory=accum parallel.reshard=false",
    },
}


def job_of(overrides: str) -> Job:
    """The job of a command line."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_job(compose("config", [*SETTINGS, *overrides.split()]))


def compare(stop: Any, jobs: dict[str, Job], num_rounds: int, out: Path) -> int:
    """One rank: a step of each way, then again, and so on; then, rank 0, a step of each whose memory is watched."""
    import torch.distributed as dist

    from parallelism.mesh import start_process_group

    device = start_process_group("cpu", 10)
    steps = {name: step_of(job, device) for name, job in jobs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARMUP + num_rounds):
        for name, (step, _) in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    found = {}
    for name, (step, footprint) in steps.items():
        with footprint.step():
            step()
        found[name] = {"peak": footprint.measured(), "seconds": seconds[name][WARMUP:]}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def step_of(job: Job, device: Any) -> Any:
    """A function that takes this rank's part in a step, and the footprint that can watch it."""
    import torch
    from torch.profiler import record_function

    from memory.footprint import OPTIMIZER, Footprint
    from training.optimizer import set_lr
    from training.run import build_model, build_optimizer, owners

    model = build_model(job, device)
    optimizer = build_optimizer(job, model, device)
    set_lr(optimizer, 1e-4)
    footprint = Footprint(device, owners(job, model, optimizer), num_steps=1)
    part, num_parts = model.data_part
    shape = (job.first_shape.num_sequences, job.first_shape.seq_len + 1)
    tokens = torch.randint(job.config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    own = tokens.chunk(num_parts)[part].split(job.first_shape.micro_batch)

    def step() -> None:
        model.step([(some[:, :-1], some[:, 1:]) for some in own])
        model.clip_grad_norm(1.0)
        footprint.note()
        with record_function(OPTIMIZER):
            optimizer.step()
            optimizer.zero_grad()

    return step, footprint


def measure(ways: dict[str, str], num_ranks: int, num_rounds: int) -> dict[str, Any]:
    """Of each way its peak by kind and the seconds of its steps."""
    from parallelism.launch import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found"
        jobs = {name: job_of(overrides) for name, overrides in ways.items()}
        assert run_ranks(compare, jobs, num_rounds, out, num_ranks=num_ranks) == 0
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def rows(found: dict[str, Any]) -> list[tuple[str, dict[str, int], float]]:
    """Name, bytes by kind on the device at the peak, and step time over that of the first way."""
    first = next(iter(found.values()))["seconds"]
    return [
        (
            name,
            {kind: size for kind, size in each["peak"].items() if kind not in ("host", "phases")},
            statistics.median(own / none for own, none in zip(each["seconds"], first)),
        )
        for name, each in found.items()
    ]


def share_of_forward(num_rounds: int) -> float:
    """Time that selective recomputing adds to the blocks of a wide model, over that of their forward."""
    import torch

    from memory.recompute import apply_recompute
    from models.gpt import GPT

    def seconds(model: GPT) -> tuple[float, float]:
        x = torch.randn(8, 256, 768, requires_grad=True)
        began = time.perf_counter()
        y = model.run_blocks(list(model.blocks.values()), x, None)
        between = time.perf_counter()
        y.sum().backward()
        return between - began, time.perf_counter() - began

    plain, selective = (GPT(job_of("model.layers=4 model.dim=768 model.heads=12").config.model) for _ in range(2))
    apply_recompute(selective, "selective")
    shares = []
    for _ in range(1 + num_rounds):
        (forward, without), (_, with_it) = seconds(plain), seconds(selective)
        shares.append((with_it - without) / forward)
    return statistics.median(shares[1:])


def draw(table: list[tuple[str, dict[str, int], float]], path: Path) -> None:
    """One bar a way, stacked by kind, with its step time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from memory.footprint import COLOURS

    figure = Figure(figsize=(11, 0.8 + 0.4 * len(table)), layout="constrained")
    axes = figure.add_subplot(xlabel="MiB on the device at the peak of a step")
    names = [f"{name}, {ratio:.2f} x the step time" for name, _, ratio in table]
    left = [0.0] * len(table)
    for kind in ("parameters", "optimizer", "gradients", "activations", "temporaries"):
        sizes = [held[kind] / 2**20 for _, held, _ in table]
        axes.barh(names, sizes, left=left, label=kind, color=COLOURS[kind])
        left = [a + b for a, b in zip(left, sizes)]
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    num_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    table = []
    print("| way | peak, MiB | of it activations | step time against none |\n| --- | --- | --- | --- |")
    for num_ranks, ways in WAYS.items():
        for name, held, ratio in rows(measure(ways, num_ranks, num_rounds)):
            table.append((name, held, ratio))
            peak, activations = sum(held.values()) / 2**20, held["activations"] / 2**20
            print(f"| `{name}` | {peak:,.0f} | {activations:,.0f} | {ratio:.2f} |", flush=True)
    draw(table, Path(__file__).parent / "memory.png")
    print(f"What memory.ckpt=selective computes again, at width 768: {share_of_forward(num_rounds):.1%} of a forward")
