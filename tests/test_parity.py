"""CONTRACT for every layout: the losses, norms, gradients and weights of one rank. The table is in tests/cases.py."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import CASES, DROPPING, MEMORY, MODELS, Case
from tests.parity import OPTIMIZERS, plain_run
from tests.products import random_products

RANKS = "tests.parity"
PRODUCTS_SEED = int(os.environ["PRODUCTS_SEED"])  # see conftest.py


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_to_one_rank(case: Case, optimizer: str, results_of_ranks: Any) -> None:
    assert_equal_to_one_rank(case, optimizer, results_of_ranks(RANKS, case.layout.world_size))


@pytest.mark.slow
@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.name)
def test_every_way_to_save_memory_is_equal_to_one_rank(case: Case, results_of_ranks: Any) -> None:
    for optimizer in OPTIMIZERS:
        assert_equal_to_one_rank(case, optimizer, results_of_ranks(RANKS, case.layout.world_size, "memory"))


@pytest.mark.slow
@pytest.mark.parametrize("case", random_products(PRODUCTS_SEED), ids=lambda case: f"{PRODUCTS_SEED}-{case.name}")
def test_random_products_are_equal_to_one_rank(case: Case, results_of_ranks: Any) -> None:
    for optimizer in OPTIMIZERS:
        assert_equal_to_one_rank(case, optimizer, results_of_ranks(RANKS, case.layout.world_size, PRODUCTS_SEED))


def assert_equal_to_one_rank(case: Case, optimizer: str, folder: Path) -> None:
    """CONTRACT 3, and a little more: the logits that sampling sees, and the weights after the steps."""
    found = torch.load(folder / f"{case.name}.pt")[optimizer]
    expected = plain_run_of(case.model, optimizer)
    if case.options.get("precision") == "bf16":
        assert_near_in_bf16(found, expected)
        return
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found["eval_loss"], expected["eval_loss"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-4, atol=1e-5)
    assert_each_close(found["gradients"], expected["gradients"])
    assert_each_close(found["weights"], expected["weights"])


def assert_near_in_bf16(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """CONTRACT 3: losses within 1%. They hardly move in three steps, so gradients and norms have to be near as well.

    bf16 rounds each operation by up to 2^-8, and a gradient here is behind some hundred of them: 2^-8 * sqrt(100) = 4%.
    """
    for name in ("losses", "eval_loss"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=0.0)
    assert (found["losses"] != expected["losses"]).all()  # bf16 it was
    torch.testing.assert_close(found["norms"], expected["norms"], rtol=5e-2, atol=0.0)
    whole_norm = expected["norms"][0]
    for name, gradient in expected["gradients"].items():
        assert (found["gradients"][name] - gradient).norm() <= max(5e-2 * gradient.norm(), 5e-3 * whole_norm), name


def assert_each_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """CONTRACT 3: each within 1e-5 of its norm, or 1e-7 of the norm of all, whichever is larger."""
    assert found.keys() == expected.keys()
    whole_norm = torch.nn.utils.get_total_norm(expected.values())
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= max(1e-5 * tensor.norm(), 1e-7 * whole_norm), name


@pytest.mark.parametrize("case", DROPPING, ids=lambda case: case.name)
def test_dropout_leaves_replicas_equal(case: Case, results_of_ranks: Any) -> None:
    found = torch.load(results_of_ranks(RANKS, case.layout.world_size) / f"{case.name}.pt")[
        "sgd"
    ]  # asserted there: equal
    assert (found["losses"] - plain_run_of("gpt2", "sgd")["losses"]).abs().max() > 1e-3


@cache
def plain_run_of(model: str, optimizer: str) -> dict[str, Any]:
    """The reference, once for all cases of a model."""
    return plain_run(MODELS[model], optimizer)
