"""Data parallel against plain PyTorch in one process: loss, every gradient, the norm and clipping."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.gpt import GPT
from tests.cli import ROOT
from tests.models.presets import model_config
from tests.parallelism.gradients import SMALL, global_batch


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The whole batch in one forward of a plain model, and the mean loss by torch's own cross-entropy."""
    model = GPT(model_config("gpt2", **SMALL))
    model.init_weights(seed=1)
    inputs, targets = global_batch()
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    return {"loss": loss.detach(), "gradients": gradients, "norm": norm}


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(1, 12), (1, 5), (2, 6), (2, 2), (3, 4), (4, 1)])
def test_gradients_are_those_of_the_mean_over_the_whole_batch(
    num_ranks: int, micro_batch: int, reference: dict[str, Any], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.parallelism.gradients", str(num_ranks), str(micro_batch), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for part in range(num_ranks):
        found = torch.load(tmp_path / f"{part}.pt")
        torch.testing.assert_close(found["loss"], reference["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(found["norm"], reference["norm"], rtol=1e-5, atol=0)
        assert found["clipped"] == pytest.approx(0.01, rel=1e-3)  # clip_grad_norm_ adds 1e-6 to the norm it divides by
        # Once per step, however many micro-batches; one rank has nobody to talk to.
        size = sum(gradient.nbytes for gradient in reference["gradients"].values())
        assert found["reduced"] == (size if num_ranks > 1 else 0)
        assert found["gradients"].keys() == reference["gradients"].keys()
        for name, expected in reference["gradients"].items():
            # CONTRACT 3: 1e-5 of the tensor's norm, or 1e-7 of the whole gradient's.
            allowed = max(1e-5 * expected.norm(), 1e-7 * reference["norm"])
            assert (found["gradients"][name] - expected).norm() <= allowed, name
