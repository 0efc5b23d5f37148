"""Initial weights that depend on the seed and a parameter's name, never on the layout or the order of drawing.

A pipeline stage, a shard or a GPU therefore starts from the numbers of the whole model on one CPU.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.config import ModelConfig

RESIDUAL = ("attention.out.weight", "mlp.down.weight")


def initial_tensor(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """The whole initial value of the parameter `name`, float32 on the CPU, of which a layout may keep a shard.

    Matrices and embeddings are normal with std sqrt(2 / (5 C)) (Nguyen and Salazar 2019, section 2.2), which is GPT-2's
    0.02 near its width and lets a narrow model learn at once; the two that write to the residual stream are divided by
    sqrt(2 layers), the number of such writes (Radford et al. 2019, section 2.3). Norms are 1, biases 0. A tied
    head.weight is the token embedding, also on a stage that holds only the head.
    """
    if name.endswith(".bias"):
        return torch.zeros(*shape)
    if len(shape) == 1:
        return torch.ones(*shape)
    if config.tie_embeddings and name == "head.weight":
        name = "embedding.weight"
    std = math.sqrt(2 / (5 * config.dim))
    if name.endswith(RESIDUAL):
        std /= math.sqrt(2 * config.layers)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(*shape).normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of `model`, which may be some blocks of the whole that `config` describes."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_tensor(name, parameter.shape, config, seed))
