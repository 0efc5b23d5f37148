"""Closed forms against the modules themselves and against torch's own FLOP counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.flops import flops_per_token, num_parameters
from models.gpt import GPT
from tests.models.presets import model_config

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_published_sizes(preset: str) -> None:
    config = model_config(preset)
    with torch.device("meta"):
        model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[preset]
    assert num_parameters(config) == PUBLISHED[preset]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": True, "tie_embeddings": False, "kv_heads": 2},
        {"bias": True, "norm": "layernorm", "mlp": "gelu", "positions": "learned", "kv_heads": 4},
        {"norm": "layernorm", "ffn_dim": 100},
    ],
)
def test_every_choice_is_counted(changes: dict[str, object]) -> None:
    config = model_config("base", layers=2, dim=64, context=32, **changes)
    with torch.device("meta"):
        model = GPT(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("changes", [{}, {"mlp": "gelu", "positions": "learned", "tie_embeddings": False}])
def test_training_flops_against_torch(changes: dict[str, object]) -> None:
    """torch counts attention in full: each token scores and sums T positions instead of (T + 1) / 2."""
    batch, time = 2, 24
    config = model_config("base", layers=2, dim=32, heads=4, vocab_size=48, **changes)
    model = GPT(config)
    model.init_weights(0)
    tokens = torch.randint(48, (batch, time))
    # The plain kernel: the flash kernel's backward makes the scores again, which torch counts as work.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    full_less_causal = config.layers * 4 * config.dim * (time - (time + 1) / 2)
    assert counter.get_total_flops() / (batch * time) == flops_per_token(config, time) + 3 * full_less_causal
