"""Ranks that take one step and leave their gradients: `python tests/parallelism/gradients.py RANKS MICRO_BATCH OUT`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.gpt import GPT
from parallelism.launch import run_ranks
from parallelism.layout import Layout
from parallelism.mesh import make_mesh, start_process_group
from parallelism.nd import parallelize
from parallelism.stop import Stop
from tests.models.presets import model_config

SMALL = {"layers": 2, "dim": 24, "heads": 2, "context": 16, "vocab_size": 65}
SEQUENCES = 12


def global_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (SEQUENCES, 16) with invalid targets, ever more of them from one sequence to the next."""
    tokens = torch.randint(65, (SEQUENCES, 17), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    for index in range(SEQUENCES):
        targets[index, :index] = -100
    return tokens[:, :-1], targets


def count_all_reduced_bytes() -> list[int]:
    """Makes every all-reduce of more than one number from here on add its bytes to the list."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.nbytes if tensor.numel() > 1 else 0)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    return sizes


def step(stop: Stop, num_ranks: int, micro_batch: int, out: Path) -> int:
    """One rank: a forward and a backward; each rank leaves its loss, gradients and norms."""
    device = start_process_group("cpu", timeout_minutes=1)
    model = GPT(model_config("gpt2", **SMALL))
    model.init_weights(seed=1)
    laid_out = parallelize(model, make_mesh(Layout(dp=num_ranks), device))
    part, num_parts = laid_out.data_part
    inputs, targets = (whole.chunk(num_parts)[part] for whole in global_batch())
    reduced = count_all_reduced_bytes()
    loss = laid_out.step(list(zip(inputs.split(micro_batch), targets.split(micro_batch))))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    kept = {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}
    norm = laid_out.clip_grad_norm(0.01)
    clipped = torch.stack([gradient.norm() for gradient in gradients.values() if gradient is not None]).norm()
    torch.save(
        {"loss": loss, "gradients": kept, "norm": norm, "clipped": clipped, "reduced": sum(reduced)}, out / f"{part}.pt"
    )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(run_ranks(step, int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), num_ranks=int(sys.argv[1])))
