"""The gradient noise scale: what measuring it costs, and whether it predicts from where on larger batches stop paying.

    python benchmarks/noise_scale.py              about 40 minutes on two cores
    python benchmarks/noise_scale.py overhead     or one part of it
    python benchmarks/noise_scale.py critical

Overhead: GPT-2 124M, 4 micro-batches of 2 x 256 a rank; in one run, steps that measure and steps that don't in turn.
Critical batch: a small model on real text is trained to a target loss at six batch sizes, the learning rate tuned for
each, with three seeds. Steps S and tokens E that it takes trade as (S/S_min - 1)(E/E_min - 1) = 1 (McCandlish et al.
2018, section 2.3), that is S = S_min (1 + B_crit/B), which is fitted; B_simple is measured in the same runs.
"""

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from training.job import Job, make_job  # noqa: E402  (the path comes first)

GPT2 = "model=gpt2 batch.seq_len=256 memory.micro_batch=2 data=synthetic device=cpu"
CASES = {
    "one rank, fp32": "batch.tokens=2048 precision=fp32",
    "one rank, bf16": "batch.tokens=2048 precision=bf16",
    "`dp=2`, bf16": "batch.tokens=4096 precision=bf16 dp=2",
    "`parallel=fsdp dp=2`, bf16": "batch.tokens=4096 precision=bf16 parallel=fsdp dp=2",
    "`parallel=pp`, bf16": "batch.tokens=2048 precision=bf16 parallel=pp",
}
EVERY = 10  # steps, of which one measures: noise.every

SMALL = (
    "model.layers=2 model.dim=64 model.heads=4 model.vocab_size=512 batch.seq_len=64 device=cpu precision=fp32 dp=1 "
    "train.steps=null lr=constant train.eval_every=0 train.footprint_steps=0 noise.every=5 logger=none"
)
BATCHES = [512, 1024, 2048, 4096, 8192, 32768]
WINDOW = 16384  # tokens over which the loss is averaged, where a step has fewer
TARGET = 3.1  # nats per token
RATE = 4e-3  # of a batch of 1,024 tokens; the rates tried follow the square root of the batch, times powers of two
TUNING_SEED, SEEDS = 0, (1, 2, 3)
PICTURE = Path(__file__).with_suffix(".png")


def job_of(overrides: str) -> Job:
    """The job of a command line."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_job(compose("config", overrides.split()))


def alternate(stop: Any, job: Job, pairs: int, out: Path) -> int:
    """One rank: plain steps and steps in halves in turn; rank 0 writes the median seconds of each."""
    import time

    import torch
    import torch.distributed as dist

    from parallelism.mesh import start_process_group
    from training.optimizer import make_optimizer, set_lr
    from training.run import build_model

    device = start_process_group(job.device, 10)
    model = build_model(job, device)
    optimizer = make_optimizer(model.parameters(), job.config.optim)
    set_lr(optimizer, 1e-4)
    shape, (part, num_parts) = job.first_shape, model.data_part
    seconds: dict[str, list[float]] = {"step": [], "step_in_halves": []}
    for number in range(pairs + 1):
        for name, times in seconds.items():
            generator = torch.Generator().manual_seed(number)
            size = (shape.num_sequences, shape.seq_len + 1)
            tokens = torch.randint(job.config.model.vocab_size, size, generator=generator).chunk(num_parts)[part]
            own = [(each[:, :-1], each[:, 1:]) for each in tokens.split(shape.micro_batch)]
            dist.barrier()
            began = time.perf_counter()
            getattr(model, name)(own)
            model.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({name: statistics.median(times[1:]) for name, times in seconds.items()}))
    dist.destroy_process_group()
    return 0


def overhead(pairs: int = 7) -> None:
    """Prints the rows of the overhead table."""
    from parallelism.launch import run_ranks

    print(f"| GPT-2 124M, 4 micro-batches of 2 x 256 a rank | step in halves / step | one in {EVERY} adds |")
    print("| --- | --- | --- |")
    for name, overrides in CASES.items():
        job = job_of(f"{GPT2} {overrides}")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "seconds"
            assert run_ranks(alternate, job, pairs, out, num_ranks=job.layout.world_size) == 0
            seconds = json.loads(out.read_text())
        ratio = seconds["step_in_halves"] / seconds["step"]
        print(f"| {name} | {ratio:.3f} | {(ratio - 1) / EVERY:.2%} |", flush=True)


@dataclass(frozen=True)
class Try:
    """One training run to the target."""

    batch: int
    rate: float
    seed: int
    steps: float = math.inf  # that it took
    noise: tuple[tuple[int, float], ...] = ()  # after how many tokens, and the noise scale there


def to_target(stop: Any, job: Job, out: Path) -> int:
    """One rank that trains until the loss is at the target, or to its last token; writes steps and noise scales."""
    import torch

    from memory.footprint import Footprint
    from parallelism.mesh import start_process_group
    from training.batch_control import BatchControl
    from training.loop import train
    from training.metrics import StepMetrics
    from training.optimizer import make_optimizer
    from training.run import build_model, prepare_data

    device = start_process_group(job.device, 10)
    torch.set_num_threads(1)
    corpus, model, control = prepare_data(job), build_model(job, device), BatchControl(job)
    width = max(1, WINDOW // job.first_shape.tokens)
    losses: list[float] = []

    class Losses:
        """A sink that remembers."""

        def record(self, metrics: dict[str, Any]) -> None:
            losses.extend([metrics["loss"]] if "loss" in metrics else [])

        def picture(self, name: str, title: str, draw: Any) -> None:
            pass

        def finish(self) -> None:
            pass

    def reached() -> int:
        return int(len(losses) >= width and statistics.fmean(losses[-width:]) <= TARGET)

    optimizer = make_optimizer(model.parameters(), job.config.optim)
    rest: tuple[Any, ...] = (control, Footprint(device, {}, 0), StepMetrics(job, None), [Losses()], device, reached)
    ended = train(job, model, optimizer, corpus, *rest)
    out.write_text(json.dumps([len(losses) if ended else math.inf, control.measured]))
    torch.distributed.destroy_process_group()
    return 0


def run(attempt: Try) -> Try:
    """What became of it, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        command = [sys.executable, __file__, "try", json.dumps([attempt.batch, attempt.rate, attempt.seed]), str(out)]
        subprocess.run(command, check=True)
        steps, noise = json.loads(out.read_text())
    found = replace(attempt, steps=steps, noise=tuple(map(tuple, noise)))
    print(f"  batch {found.batch:,}, rate {found.rate:.2e}, seed {found.seed}: {steps:,} steps", flush=True)
    return found


def one_try(attempt: Try, out: Path) -> None:
    """The process of a try, which warms up over ten steps and gives up in the end."""
    from parallelism.launch import run_ranks

    batch = attempt.batch
    rates = f"lr.peak={attempt.rate} lr.final=0 lr.warmup_tokens={10 * batch}"
    most = f"batch.tokens={batch} train.tokens={1_200_000 + 100 * batch} seed={attempt.seed}"
    assert run_ranks(to_target, job_of(f"{SMALL} {rates} {most}"), out, num_ranks=1) == 0


def tuned(batch: int, attempts: Callable[[Sequence[Try]], list[Try]]) -> list[Try]:
    """The tries with the best learning rate for a batch, one a seed; none of them has been used to find it."""
    middle = RATE * math.sqrt(batch / 1024)
    wanted, results = {-1, 0, 1}, dict[int, Try]()  # by the power of two that the middle is multiplied by
    while wanted - results.keys():
        missing = sorted(wanted - results.keys())
        results |= dict(zip(missing, attempts([Try(batch, middle * 2.0**power, TUNING_SEED) for power in missing])))
        best = min(results, key=lambda power: results[power].steps)
        assert results[best].steps < math.inf, f"no rate reaches the target with a batch of {batch}"
        wanted |= {best - 1, best + 1}  # the best has a worse one on both sides
    return attempts([Try(batch, results[best].rate, seed) for seed in SEEDS])


def fit(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """S_min and B_crit of S = S_min (1 + B_crit / B), by least squares in log S."""
    ratios = np.log1p(np.geomspace(10, 1e6, 4000)[:, None] / np.asarray(batches))  # (4000, N)
    rest = np.log(steps) - ratios
    best = int(rest.var(axis=1).argmin())
    return float(np.exp(rest[best].mean())), float(np.geomspace(10, 1e6, 4000)[best])


def critical() -> None:
    """Trains, prints the rows of the table and draws the picture."""
    with ThreadPoolExecutor(2) as pool:  # a core each
        results = {batch: tuned(batch, lambda tries: list(pool.map(run, tries))) for batch in BATCHES}
    s_min, b_crit = fit(*zip(*((batch, each.steps) for batch, tries in results.items() for each in tries)))
    each_seed = sorted(fit(list(results), [tries[i].steps for tries in results.values()])[1] for i in range(len(SEEDS)))
    print(
        "| batch, tokens | learning rate | steps | tokens | B_simple at the target |\n| --- | --- | --- | --- | --- |"
    )
    for batch, tries in results.items():
        steps = statistics.fmean(each.steps for each in tries)
        noise = [each.noise[-1][1] for each in tries if each.noise]
        simple = f"{statistics.fmean(noise):,.0f}" if noise else "not known"
        print(f"| {batch:,} | {tries[0].rate:.1e} | {steps:,.0f} | {batch * steps / 1e6:.2f}M | {simple} |")
    alone = ", ".join(f"{each:,.0f}" for each in each_seed)
    print(f"B_crit = {b_crit:,.0f} tokens (of each seed alone: {alone}), S_min = {s_min:,.0f} steps")
    draw(results, s_min, b_crit, (each_seed[0], each_seed[-1]))


def draw(results: dict[int, list[Try]], s_min: float, b_crit: float, interval: tuple[float, float]) -> None:
    """Steps and tokens to the target beside the noise scale of the same runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    cost, noise = figure.subplots(1, 2)
    for batch, tries in results.items():
        (dots,) = cost.plot(
            [each.steps for each in tries], [batch * each.steps for each in tries], ".", label=f"{batch:,}"
        )
        for each in (each for each in tries if each.noise):
            noise.plot(*zip(*each.noise), color=dots.get_color(), alpha=0.7)
    batches = np.geomspace(min(results) / 2, max(results) * 2, 200)
    curve = s_min * (1 + b_crit / batches)
    cost.plot(curve, batches * curve, color="black", linewidth=1, label=f"fit: B_crit = {b_crit:,.0f}")
    cost.set(xscale="log", yscale="log", xlabel="steps", ylabel="tokens", title=f"to a loss of {TARGET} nats")
    cost.legend(title="batch, tokens", frameon=False)
    noise.axhspan(*interval, color="black", alpha=0.15)
    noise.axhline(b_crit, color="black", label="B_crit of the fit; shaded: of the seeds")
    noise.set(xscale="log", yscale="log", xlabel="tokens", ylabel="tokens", title="B_simple in the same runs")
    noise.legend(frameon=False)
    FigureCanvasAgg(figure).print_png(PICTURE)


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else "all"
    if part == "try":
        one_try(Try(*json.loads(sys.argv[2])), Path(sys.argv[3]))
    if part in ("all", "overhead"):
        overhead()
    if part in ("all", "critical"):
        critical()
