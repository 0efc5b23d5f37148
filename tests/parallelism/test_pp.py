"""How a model is cut into stages; that its numbers are one rank's is in tests/test_parity.py."""

import torch

from models.gpt import GPT
from parallelism.pp import cut_stage
from tests.parity import MODELS


def test_stages_have_the_names_of_the_whole_and_each_parameter_once() -> None:
    with torch.device("meta"):
        whole = GPT(MODELS["gpt2_untied"])
    names = [name for stage in range(2) for name, _ in cut_stage(whole, [1, 1], stage).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
