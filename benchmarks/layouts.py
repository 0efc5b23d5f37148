"""How fast each layout is on this machine's cores, against one rank with the same global batch and as many threads.

    python benchmarks/layouts.py          about eight minutes on two cores
    python benchmarks/layouts.py 21       pairs of steps per row, 11 otherwise

Two ranks of one thread each, and one of them with two threads, take a step of the same batch in turn, back to back, so
that a noisy machine disturbs both alike; what counts is the median ratio of the pairs. The first row's two ranks do not
talk to each other: it is what the machine allows.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from training.job import Job, make_job  # noqa: E402  (the path comes first)

RANKS = 2
WARMUP = 2  # pairs that are not counted
MODEL = "model.layers=8 model.dim=256 model.context=256 batch.seq_len=256 batch.tokens=4096 memory.micro_batch=8"
SETTINGS = [*MODEL.split(), "data=synthetic", "device=cpu", "precision=fp32"]
INTERLEAVED = "parallel.pp_schedule=interleaved_1f1b parallel.pp_virtual=2"
ALONE = "two ranks that do not communicate"
LAYOUTS = {
    ALONE: "dp=2",
    "dp=2": "dp=2",
    "parallel=fsdp dp=2": "parallel=fsdp dp=2",
    "parallel=fsdp dp=2 parallel.reshard=false": "parallel=fsdp dp=2 parallel.reshard=false",
    "parallel=tp": "parallel=tp dp=1",
    "parallel=tp parallel.sequence_parallel=true": "parallel=tp dp=1 parallel.sequence_parallel=true",
    "parallel=pp": "parallel=pp dp=1 memory.micro_batch=4",
    "parallel=pp, interleaved": f"parallel=pp dp=1 memory.micro_batch=4 {INTERLEAVED}",
    "parallel=cp": "parallel=cp dp=1",
    "parallel=cp parallel.cp_method=ulysses": "parallel=cp dp=1 parallel.cp_method=ulysses",
    "parallel=cp parallel.cp_method=allgather": "parallel=cp dp=1 parallel.cp_method=allgather",
}


def job_of(overrides: str) -> Job:
    """The job of a command line."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_job(compose("config", [*SETTINGS, *overrides.split()]))


def compare(stop: Any, name: str, job: Job, num_pairs: int, out: Path) -> int:
    """One of two ranks: a step of the layout on both, then one of the whole model on rank 0, and so on."""
    import torch
    import torch.distributed as dist

    from parallelism.mesh import start_process_group

    device = start_process_group(job.device, 10)
    both = laid_out_step(name, job, device)
    one = plain_step(job, device) if dist.get_rank() == 0 else lambda: None
    pairs = []
    for _ in range(WARMUP + num_pairs):
        torch.set_num_threads(1)
        seconds_of_both = timed(both)
        torch.set_num_threads(RANKS)
        pairs.append((seconds_of_both, timed(one)))
    if dist.get_rank() == 0:
        out.write_text("\n".join(f"{both} {one}" for both, one in pairs[WARMUP:]))
    dist.destroy_process_group()
    return 0


def timed(step: Any) -> float:
    """Seconds until the slowest rank is through."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - began


def laid_out_step(name: str, job: Job, device: Any) -> Any:
    """A function that takes this rank's part in a step of the layout."""
    from training.optimizer import make_optimizer, set_lr
    from training.run import build_model

    if name == ALONE:
        return plain_step(job, device, share=RANKS)
    model = build_model(job, device)
    optimizer = make_optimizer(model.parameters(), job.config.optim)
    set_lr(optimizer, 1e-4)
    part, num_parts = model.data_part
    inputs, targets = (whole.chunk(num_parts)[part] for whole in batch(job))

    def step() -> None:
        model.step(list(zip(inputs.split(job.first_shape.micro_batch), targets.split(job.first_shape.micro_batch))))
        model.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_step(job: Job, device: Any, share: int = 1) -> Any:
    """A function that trains the whole model with plain PyTorch on one of `share` parts of the batch."""
    import torch.nn.functional as F
    from torch import nn, optim

    from models.gpt import GPT

    model = GPT(job.config.model).to(device)
    model.init_weights(job.config.seed)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = (whole.chunk(share)[0] for whole in batch(job))
    size = job.first_shape.micro_batch

    def step() -> None:
        for some, wanted in zip(inputs.split(size), targets.split(size)):
            logits = model(some)
            (F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def batch(job: Job) -> Any:
    """Inputs and targets (B, T) of the whole batch."""
    import torch

    shape = (job.first_shape.num_sequences, job.first_shape.seq_len + 1)
    tokens = torch.randint(job.config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def measure(name: str, num_pairs: int) -> tuple[float, float, float]:
    """Median seconds of a step of the layout and of one rank, and the median of one rank's over the layout's."""
    import tempfile

    from parallelism.launch import run_ranks

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pairs"
        assert run_ranks(compare, name, job_of(LAYOUTS[name]), num_pairs, out, num_ranks=RANKS) == 0
        pairs = [tuple(map(float, line.split())) for line in out.read_text().splitlines()]
    both, one = zip(*pairs)
    return statistics.median(both), statistics.median(one), statistics.median(b / a for a, b in pairs)


if __name__ == "__main__":
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    print("| layout | tokens/s | one rank, two threads, tokens/s | ratio |\n| --- | --- | --- | --- |")
    for name in LAYOUTS:
        both, one, ratio = measure(name, num_pairs)
        tokens = job_of(LAYOUTS[name]).first_shape.tokens
        print(f"| {name} | {tokens / both:,.0f} | {tokens / one:,.0f} | {ratio:.2f} |", flush=True)
