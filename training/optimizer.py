"""AdamW as GPTs are trained with it."""

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from memory.offload_optimizer import HostOptimizer
from training.config import OptimConfig

Optimizer: TypeAlias = torch.optim.Optimizer | HostOptimizer


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Moments and counts of steps, where they lie on the device."""
    if isinstance(optimizer, HostOptimizer):
        return []
    return [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov and Hutter 2019, algorithm 2); weight decay on matrices and embeddings only.

    The learning rate is 0 until `set_lr`.
    """
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
