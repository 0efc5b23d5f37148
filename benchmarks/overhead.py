"""What the trainer costs over a bare PyTorch loop: speed and peak memory, same model, same tokens.

    python benchmarks/overhead.py              about 15 minutes on two cores
    python benchmarks/overhead.py speed        or one part of it
    python benchmarks/overhead.py memory

Speed: one process holds both; after every step of the trainer (file, W&B and terminal included) the bare loop takes
one on the same tokens, and the medians are compared, so that a noisy machine disturbs both alike.
Memory: each in processes of its own; the highest resident set of the one that trains, as the kernel saw it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from training.job import Job, make_job  # noqa: E402  (the path comes first)

WARMUP = 3  # steps that are not counted: the first ones allocate and, with compile, compile

GPT2 = "model=gpt2 batch.tokens=512 batch.seq_len=256 memory.micro_batch=2"
SHORT = ["data=synthetic", "train.eval_every=0", "train.eval_tokens=512", "dp=1", "device=cpu"]
CASES = {
    "default model": ("", 30),
    "GPT-2 124M, 2 x 256, fp32": (f"{GPT2} precision=fp32", 8),
    "GPT-2 124M, 2 x 256, precision=auto": (f"{GPT2} precision=auto", 8),
    "GPT-2 124M, 2 x 256, precision=auto compile=true": (f"{GPT2} precision=auto compile=true", 8),
}


def job_of(overrides: str, steps: int) -> Job:
    """The job of a command line, on synthetic tokens and one CPU rank."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_job(compose("config", [*SHORT, f"train.steps={steps}", *overrides.split()]))


class BareLoop:
    """What anybody would write around the same model, in fp32: cross-entropy, clipping, AdamW."""

    def __init__(self, job: Job, device: Any) -> None:
        import torch

        from models.gpt import GPT

        self.model = GPT(job.config.model).to(device)
        self.model.init_weights(job.config.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.job, self.device = job, device

    def step(self, inputs: Any, targets: Any) -> None:
        """One step on inputs and targets, both (B, T)."""
        import torch
        import torch.nn.functional as F

        logits = self.model(inputs.to(self.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def compare(stop: Any, job: Job, folder: Path, out: Path) -> int:
    """One rank that runs the trainer and, between its steps, the bare loop; writes both medians."""
    import torch

    from data.stream import rank_batch
    from memory.footprint import Footprint
    from parallelism.mesh import start_process_group
    from training.batch_control import BatchControl
    from training.console import Terminal
    from training.loop import train
    from training.metrics import StepMetrics
    from training.optimizer import make_optimizer
    from training.run import build_model, make_sinks, prepare_data

    device = start_process_group(job.device, 10)
    corpus = prepare_data(job)
    model = build_model(job, device)
    bare = BareLoop(job, device)
    seconds: dict[str, list[float]] = {"trainer": [], "bare": []}

    class Between:
        """A sink that is told after each step: it takes the bare loop's step and both times."""

        began = time.perf_counter()

        def record(self, metrics: dict[str, Any]) -> None:
            if "loss" not in metrics:
                return
            seconds["trainer"].append(time.perf_counter() - self.began)
            shape, consumed = job.first_shape, metrics["tokens"] - job.first_shape.tokens
            batch = rank_batch(corpus.train, job.config.seed, consumed, shape.num_sequences, shape.seq_len)
            inputs, targets = map(torch.from_numpy, batch)
            began = time.perf_counter()
            bare.step(inputs, targets)
            seconds["bare"].append(time.perf_counter() - began)
            self.began = time.perf_counter()

        def picture(self, name: str, title: str, draw: Any) -> None:
            pass

        def finish(self) -> None:
            pass

    sinks = [*make_sinks(job, folder, Terminal(job, folder, corpus)), Between()]
    optimizer = make_optimizer(model.parameters(), job.config.optim)
    control, footprint = BatchControl(job), Footprint(device, {}, 0)
    train(job, model, optimizer, corpus, control, footprint, StepMetrics(job, None), sinks, device, stop)
    for sink in sinks:
        sink.finish()
    torch.distributed.destroy_process_group()
    medians = [statistics.median(seconds[name][WARMUP:]) for name in ("trainer", "bare")]
    out.write_text(" ".join(map(str, medians)))
    return 0


def medians(overrides: str, steps: int) -> tuple[float, float]:
    """Median seconds of a step of the trainer's and of the bare loop's."""
    from parallelism.launch import run_ranks

    job = job_of(overrides, steps + WARMUP)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "medians"
        assert run_ranks(compare, job, Path(folder), out, num_ranks=1) == 0
        trainer, bare = map(float, out.read_text().split())
    return trainer, bare


def speed() -> list[str]:
    """The rows of the speed table."""
    rows = ["| case | bare fp32 loop, tokens/s | trainer, tokens/s | trainer / bare |", "| --- | --- | --- | --- |"]
    for name, (overrides, steps) in CASES.items():
        trainer, bare = medians(overrides, steps)
        job = job_of(overrides, steps)
        tokens = job.first_shape.tokens
        rates = f"{tokens / bare:,.0f} | {tokens / trainer:,.0f} | {bare / trainer:.3f}"
        rows.append(f"| {name} ({job.precision}) | {rates} |")
    return rows


def peaks() -> tuple[int, int]:
    """Peak bytes of the trainer's rank and of the bare loop: GPT-2 124M in fp32, four steps."""
    with tempfile.TemporaryDirectory() as folder:
        ours = [sys.executable, str(ROOT / "train.py"), *SHORT, *GPT2.split(), "precision=fp32", "train.steps=4"]
        ours += ["train.sample_tokens=0", f"hydra.run.dir={folder}/run"]
        return peak_bytes(ours), peak_bytes([sys.executable, __file__, "bare"])


def memory() -> list[str]:
    """The rows of the memory table."""
    trainer, bare = peaks()
    return [
        "| GPT-2 124M, 2 x 256, fp32 | peak resident memory |",
        "| --- | --- |",
        f"| bare loop | {bare / 2**30:.2f} GiB |",
        f"| trainer | {trainer / 2**30:.2f} GiB ({trainer / bare - 1:+.1%}) |",
    ]


def peak_bytes(command: list[str]) -> int:
    """The largest resident set of a command's processes."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, command
    return usage.ru_maxrss * 1024


def bare() -> None:
    """The bare loop alone, for `memory`."""
    import torch

    job = job_of(f"{GPT2} precision=fp32", 4)
    loop = BareLoop(job, torch.device(job.device))
    for step in range(4):
        tokens = torch.randint(job.config.model.vocab_size, (2, 257), generator=torch.Generator().manual_seed(step))
        loop.step(tokens[:, :-1], tokens[:, 1:])


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else "all"
    if part == "bare":
        bare()
    else:
        rows = (speed() if part != "memory" else []) + (["", *memory()] if part != "speed" else [])
        print("\n".join(rows))
