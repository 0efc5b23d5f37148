"""What is saved for backward, counted; and the lecture's figure."""

import pytest
import torch
from torch import Tensor

from models.activations import mlp_activations
from models.gpt import MLP
from tests.models.presets import model_config

GIB = 2**30


@pytest.mark.parametrize(("preset", "ffn_dim"), [("llama3_405b", 208), ("gpt2", 256)])
def test_an_mlp_saves_what_the_closed_form_says(preset: str, ffn_dim: int) -> None:
    config = model_config(preset, dim=64, heads=4, kv_heads=4, ffn_dim=ffn_dim)
    mlp, num_tokens = MLP(config), 32
    weights = {parameter.untyped_storage().data_ptr() for parameter in mlp.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(1, num_tokens, config.dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mlp(x)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert num_bytes == pytest.approx(4 * num_tokens * mlp_activations(config), rel=0.02)


def test_llama_405b_in_bf16() -> None:
    """One tensor 4 C wide a layer is what lectures count; SwiGLU at 53,248 saves three and a half times that."""
    config = model_config("llama3_405b")
    values = config.layers * 4096
    assert 2 * values * 4 * config.dim == 63 * GIB
    assert 2 * values * mlp_activations(config) == 220.5 * GIB
