"""Initial weights follow from seed and name alone, whatever part of the model is there."""

import math
from typing import Any

import torch

from models.gpt import GPT
from models.init import initial_tensor
from tests.models.presets import model_config

GPT2: dict[str, Any] = {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True}
SMALL: dict[str, Any] = {"layers": 3, "dim": 32, "heads": 4, "vocab_size": 64, "context": 16}


def weights(seed: int = 0, keep: tuple[str, ...] = ("0", "1", "2"), **changes: Any) -> dict[str, torch.Tensor]:
    model = GPT(model_config("base", **{**SMALL, **changes}))
    for index in [index for index in model.blocks if index not in keep]:
        del model.blocks[index]
    model.init_weights(seed)
    return dict(model.named_parameters())


def test_same_seed_same_weights_and_another_seed_others() -> None:
    first, again, other = weights(0), weights(0), weights(1)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name]) == name.endswith("norm.weight")


def test_no_two_parameters_share_their_numbers() -> None:
    starts = [tensor.flatten()[:8].tolist() for name, tensor in weights(**GPT2).items() if tensor.ndim == 2]
    assert len({tuple(start) for start in starts}) == len(starts)


def test_a_stage_gets_the_values_of_the_whole() -> None:
    whole, stage = weights(), weights(keep=("1",))
    assert {name.split(".")[1] for name in stage if name.startswith("blocks")} == {"1"}
    for name, tensor in stage.items():
        assert torch.equal(tensor, whole[name])


def test_a_lone_tied_head_is_the_embedding() -> None:
    for tied in (True, False):
        model = GPT(model_config("base", **SMALL, tie_embeddings=tied))
        model.embedding = None
        model.init_weights(0)
        assert model.head is not None
        assert torch.equal(model.head.weight, weights()["embedding.weight"]) == tied


def test_initial_tensor_is_what_the_model_gets_on_any_dtype() -> None:
    model = GPT(model_config("base", **SMALL)).to(torch.bfloat16)
    model.init_weights(5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, initial_tensor(name, parameter.shape, model.config, seed=5).bfloat16())


def test_scales() -> None:
    for name, tensor in weights(dim=128, **GPT2).items():
        if name.endswith(".bias"):
            assert torch.equal(tensor, torch.zeros_like(tensor))
        elif tensor.ndim == 1:
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = math.sqrt(2 / (5 * 128)) / (math.sqrt(6) if residual else 1)
            assert abs(tensor.std().item() / std - 1) < 0.05
            assert abs(tensor.mean().item()) < std / 10


def test_meta_model_is_filled_whole() -> None:
    with torch.device("meta"):
        model = GPT(model_config("base", **SMALL))
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    model.init_weights(0)
    assert model.embedding is not None
    assert model.head is not None
    assert model.head.weight is model.embedding.weight
    assert not list(model.buffers())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights()[name])
