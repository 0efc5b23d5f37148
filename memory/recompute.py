"""Activation checkpointing: blocks forget what they computed, and compute it again when backward needs it.

Plans differ in what they keep of L blocks, and in what they compute twice:

    full       the input of every block                        one more forward
    sqrt       the input of every sqrt(L)-th block             one more forward, a segment of sqrt(L) blocks at a time
    sqrt_deep  the same                                        (sqrt(L)+1)/2 more forwards, one block at a time
    selective  what matrix products and attention give         the rest, which is cheap

Chen et al. 2016, section 4 (full, sqrt); sqrt_deep goes back to the nearest checkpoint for every block; selective is
after Korthikanti et al. 2022, section 5. Random state is restored, so that dropout drops the same. Torch's checkpoint
does the work: it puts back what a forward saved, and leaves autograd's graph, with all hooks of layouts, as it was.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memory.plans import segment_size
from models.gpt import GPT, run_blocks

KEPT = {  # operators whose results `selective` keeps, on CPUs and GPUs; see _policy for others
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
}


def apply_recompute(model: GPT, plan: str) -> None:
    """Has the model's blocks run by a plan of memory.ckpt, in place. Segments have sqrt(L) blocks, rounded up.

    Recomputing goes on around blocks, compiled or not; `selective` alone looks into them, and is compiled with them.
    """
    if plan in RUNNERS:
        model.run_blocks = partial(RUNNERS[plan], segment_size(plan, len(model.blocks)))
    elif plan == "selective":
        for block in model.blocks.values():
            block.forward = _selective(block.forward)


def _selective(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function, which torch.compile looks into; it would run a partial of `checkpoint` as it is."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)

    def run(x: Tensor, rotation: Any) -> Tensor:
        return checkpoint(forward, x, rotation, use_reentrant=False, context_fn=contexts)

    return run


def _policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps also what collectives give, but for those of a ring, and what was drawn at random.

    Attention that is kept does not draw its dropout again, so others that draw after it would draw something else.
    """
    drawn = torch.Tag.nondeterministic_seeded in operator.tags and not operator._schema.is_mutable
    kept = str(operator) in KEPT or operator.namespace == "_c10d_functional" or drawn
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _by_segment(size: int, blocks: Sequence[nn.Module], x: Tensor, rotation: Any) -> Tensor:
    """Keeps the input of each segment, whose blocks run again all at once."""
    for first in range(0, len(blocks), size):
        x = checkpoint(run_blocks, blocks[first : first + size], x, rotation, use_reentrant=False)
    return x


def _by_block(size: int, blocks: Sequence[nn.Module], x: Tensor, rotation: Any) -> Tensor:
    """Keeps the input of each segment; a block that runs again first has those before it lead there."""
    for first in range(0, len(blocks), size):
        start, random_state = x, _random_state(x)
        for index in range(first, min(first + size, len(blocks))):
            run = _led_to(blocks[first:index], random_state, blocks[index], x)
            x = checkpoint(run, start, rotation, use_reentrant=False)
    return x


def _led_to(
    before: Sequence[nn.Module], random_state: list[Tensor], block: nn.Module, x: Tensor
) -> Callable[[Tensor, Any], Tensor]:
    """A function of the segment's start that runs the block: at first on x, later on what those before it lead to."""
    entering = [x]

    def run(start: Tensor, rotation: Any) -> Tensor:
        if entering:
            return block(entering.pop(), rotation)
        x = start
        if before:
            with torch.no_grad():
                _set_random_state(random_state, start)
                x = run_blocks(before, start, rotation).requires_grad_()
        return block(x, rotation)

    return run


def _random_state(like: Tensor) -> list[Tensor]:
    """That of the CPU and, for a tensor on a GPU, of that."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(like.device)] if like.is_cuda else [])


def _set_random_state(state: list[Tensor], like: Tensor) -> None:
    torch.set_rng_state(state[0])
    if like.is_cuda:
        torch.cuda.set_rng_state(state[1], like.device)


RUNNERS = {"full": _by_segment, "sqrt": _by_segment, "sqrt_deep": _by_block}
