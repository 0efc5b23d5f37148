"""The plans of memory.ckpt on paper: see recompute.py for what they do. Imports no torch."""

from collections.abc import Sequence
from math import isqrt

from models.config import ModelConfig
from models.flops import block_flops_per_token


def segment_size(plan: str, num_blocks: int) -> int:
    """Blocks from one checkpoint to the next: 1 in `full`, in `sqrt` and `sqrt_deep` the square root, rounded up."""
    return 1 if plan == "full" else isqrt(max(num_blocks, 1) - 1) + 1


def recomputed_flops_per_token(config: ModelConfig, seq_len: int, plan: str, stages: Sequence[int]) -> int:
    """Floating-point operations that a step computes twice, in the convention of `flops_per_token`.

    `stages`: the number of blocks of each pipeline stage, which plans take one by one; [layers] without a pipeline.
    A run again ends once all that backward needs is there: the last matrix of a block's last run only gave its output,
    which is needed only where dropout follows.
    """
    block = block_flops_per_token(config, seq_len)
    last_matrix = 0 if config.dropout else 2 * config.dim * config.hidden_dim
    total = 0
    for num_blocks in stages:
        size = segment_size(plan, num_blocks)
        segments = [min(size, num_blocks - first) for first in range(0, num_blocks, size)]
        if plan in ("full", "sqrt"):
            total += num_blocks * block - len(segments) * last_matrix
        elif plan == "sqrt_deep":
            total += sum(n * (n + 1) // 2 * block - n * last_matrix for n in segments)
    return total
