"""What travels to host memory and back, counted, and that it changes no number; all layouts are in tests/cases.py."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memory import offload_optimizer
from memory.copies import Traffic
from memory.footprint import Footprint, Owners
from memory.offload_activations import offload_activations
from memory.offload_optimizer import HostOptimizer
from models.gpt import GPT
from tests.memory.test_recompute import (
    OUTPUT,
    gradients_of,
    make_model,
    num_bytes,
    peaks,
    run,
    tokens,
    watched_step,
)
from training.optimizer import state_of

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
}
Spans = list[tuple[int, int]]


def train(model: GPT, optimizer: HostOptimizer | torch.optim.Optimizer, passes: int = 1, steps: int = 3) -> None:
    """Some steps of so many micro-batches."""
    for _ in range(steps):
        for _ in range(passes):
            model(*tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("bucket_bytes", [1, 2**30])
@pytest.mark.parametrize("name", MAKERS)
def test_updates_on_the_host_are_those_of_the_device(
    name: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_optimizer, "BUCKET_BYTES", bucket_bytes)
    here, there = make_model("none", layers=2), make_model("none", layers=2)
    train(here, MAKERS[name](here.parameters()))
    train(there, HostOptimizer(there.parameters(), CPU, MAKERS[name]))
    for one, other in zip(here.parameters(), there.parameters()):
        assert torch.equal(one, other)


def test_a_learning_rate_reaches_every_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_optimizer, "BUCKET_BYTES", 1)
    model = make_model("none", layers=2)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = HostOptimizer(model.parameters(), CPU, MAKERS["sgd"])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_the_master_copy_is_on_the_host() -> None:
    """Whatever becomes of the device's after the first step."""
    here, there = make_model("none", layers=1), make_model("none", layers=1)
    optimizer, offloaded = MAKERS["sgd"](here.parameters()), HostOptimizer(there.parameters(), CPU, MAKERS["sgd"])
    for step in range(2):
        for one, other in zip(here.parameters(), there.parameters()):
            one.grad, other.grad = torch.ones_like(one), torch.ones_like(one)
            if step == 1:
                other.data.zero_()
        optimizer.step()
        offloaded.step()
    for one, other in zip(here.parameters(), there.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("passes", [1, 4])
def test_a_step_moves_gradients_out_and_weights_back_once(passes: int) -> None:
    model = make_model("none", layers=2)
    optimizer = HostOptimizer(model.parameters(), CPU, MAKERS["adamw"])
    train(model, optimizer, passes, steps=3)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.traffic == Traffic(out=3 * size, back=3 * size)


def test_weights_gradients_and_moments_have_host_memory_of_their_own() -> None:
    model = make_model("none", layers=2)
    optimizer = HostOptimizer(model.parameters(), CPU, MAKERS["adamw"])
    train(model, optimizer)
    model(*tokens()).backward()
    device = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert not overlap(memory(device), memory(optimizer.host_tensors))
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(end - begin for begin, end in memory(optimizer.host_tensors)) >= 4 * size


def memory(tensors: list[Tensor]) -> Spans:
    """Where they lie."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


def overlap(ones: Spans, others: Spans) -> bool:
    return any(a < d and c < b for a, b in ones for c, d in others)


def gradients(model: GPT) -> list[Tensor]:
    """After one backward."""
    torch.manual_seed(7)
    model(*tokens()).backward()
    return gradients_of(model)


@pytest.mark.parametrize("plan", ["none", "full", "sqrt", "sqrt_deep", "selective"])
def test_activations_come_back_bitwise(plan: str) -> None:
    offloaded = make_model(plan, dropout=0.1)
    offload_activations(offloaded, CPU)
    for plain, found in zip(gradients(make_model("none", dropout=0.1)), gradients(offloaded), strict=True):
        assert torch.equal(plain, found)


def test_what_blocks_save_travels_once_and_weights_stay() -> None:
    """As many bytes as hooks count without offloading, since each memory is counted once there too."""
    model = make_model("none")
    traffic = offload_activations(model, CPU)
    run(model).sum().backward()
    assert traffic.out == traffic.back == num_bytes("none")


def test_of_a_recomputed_block_its_input_travels() -> None:
    model = make_model("full")
    traffic = offload_activations(model, CPU)
    run(model).sum().backward()
    assert traffic.out == traffic.back == 16 * OUTPUT


def test_a_graph_that_is_kept_can_be_gone_back_through_twice() -> None:
    model = make_model("none", layers=2)
    offload_activations(model, CPU)
    loss = model(*tokens())
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    loss.backward()
    for first, parameter in zip(once, model.parameters()):
        torch.testing.assert_close(parameter.grad, 2 * first)


class Reuse(nn.Module):
    """A block that changes what it has saved, in place, before it saves it again."""

    def forward(self, x: Tensor, rotation: None) -> Tensor:
        y = x * 2
        first = y.detach() * x  # saves y
        y.mul_(3)
        return first + y.detach() * x  # saves what y is now


def test_memory_that_has_changed_is_not_taken_for_what_it_was() -> None:
    model = make_model("none", layers=1)
    model.blocks["0"] = Reuse()
    offload_activations(model, CPU)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    model.run_blocks(list(model.blocks.values()), x, None).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.tensor([2.0 + 6.0, 4.0 + 12.0]))


def held_in_second_step(offloaded: bool) -> dict[str, dict[str, int]]:
    """The peaks of its phases."""
    model = make_model("none")
    optimizer: HostOptimizer | torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if offloaded:
        optimizer = HostOptimizer(model.parameters(), CPU, MAKERS["adamw"])
        offload_activations(model, CPU)
    owners: Owners = {
        "parameters": model.parameters,
        "gradients": lambda: gradients_of(model),
        "optimizer": lambda: state_of(optimizer),
        "host": lambda: optimizer.host_tensors if isinstance(optimizer, HostOptimizer) else [],
    }
    footprint = Footprint(CPU, owners, num_steps=2)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        watched_step(footprint, model, update)
        found = footprint.measured()
    assert found is not None
    return found["phases"]


def test_the_footprint_shows_what_is_left_on_the_device() -> None:
    """No moments, and of a deep model's activations only what is on its way."""
    here, there = held_in_second_step(offloaded=False), held_in_second_step(offloaded=True)
    blocks = list(make_model("none").blocks.parameters())
    size = 4 * sum(parameter.numel() for parameter in blocks)
    assert here["forward"]["optimizer"] == 2 * size + 4 * len(blocks)  # two moments, and the number of steps
    assert there["forward"]["optimizer"] == 0
    assert there["forward"]["activations"] == OUTPUT  # what comes out
    assert there["forward"]["host"] > 4 * size
    # What came back does not stay: a block's at a time, and what any backward needs beside.
    plain, peak = peaks("none", 16)
    on_device = there["backward"]["activations"] + there["backward"]["temporaries"]
    assert on_device <= OUTPUT + plain / 16 + (peak - plain)
