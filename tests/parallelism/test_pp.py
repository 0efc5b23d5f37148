"""How a model is cut into stages; that its numbers are one rank's is in tests/test_parity.py."""

import pytest
import torch

from models.flops import head_layers
from models.gpt import GPT
from parallelism.pp import cut_stage, split_layers
from tests.models.presets import model_config
from tests.parity import MODELS


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "head", "expected"),
    [
        (8, 2, 0.0, [4, 4]),
        (8, 2, 2.0, [5, 3]),  # the head costs two blocks
        (16, 16, 1.3, [1] * 16),  # every stage has a block
        (8, 3, 1.0, [3, 3, 2]),
    ],
)
def test_layers_are_split_by_cost(num_layers: int, num_stages: int, head: float, expected: list[int]) -> None:
    assert split_layers(num_layers, num_stages, head) == expected


def test_the_head_of_gpt2_costs_five_blocks() -> None:
    """50,257 x 768 against 12 x 768^2."""
    assert head_layers(model_config("gpt2")) == pytest.approx(50257 / (12 * 768))


def test_stages_have_the_names_of_the_whole_and_each_parameter_once() -> None:
    with torch.device("meta"):
        whole = GPT(MODELS["gpt2_untied"])
    names = [name for stage in range(2) for name, _ in cut_stage(whole, [1, 1], stage).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
