"""What recomputing keeps and computes twice, counted; that it changes no number on one rank, bitwise."""

from collections.abc import Callable
from functools import cache
from math import sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.flop_counter import FlopCounterMode

from memory import recompute
from memory.config import CKPT
from memory.footprint import BACKWARD, FORWARD, Footprint, Owners
from memory.plans import recomputed_flops_per_token
from memory.recompute import apply_recompute
from models.flops import block_flops_per_token
from models.gpt import GPT
from tests.models.presets import model_config

BATCH, SEQ_LEN, DIM = 2, 64, 64
HIDDEN = (BATCH, SEQ_LEN, DIM)
OUTPUT = 4 * BATCH * SEQ_LEN * DIM  # bytes of the hidden states


def make_model(plan: str, layers: int = 16, preset: str = "gpt2", **sizes: object) -> GPT:
    """A model that runs by the plan."""
    shape = {"layers": layers, "dim": DIM, "heads": 4, "context": SEQ_LEN, "vocab_size": 65, **sizes}
    model = GPT(model_config(preset, **shape))
    model.init_weights(seed=1)
    apply_recompute(model, plan)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Inputs and targets (B, T)."""
    both = torch.randint(65, (2, BATCH, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    return both[0], both[1]


def run(model: GPT) -> Tensor:
    """The blocks alone."""
    x = torch.randn(HIDDEN, requires_grad=True)
    return model.run_blocks(list(model.blocks.values()), x, model._rotation(torch.arange(SEQ_LEN)))


def total_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and attention."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def saved_tensors(plan: str) -> list[Tensor]:
    """What autograd keeps of the blocks' forward: each memory once, that of parameters left out."""
    model = make_model(plan)
    kept: dict[int, Tensor] = {}
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(model)
    return list(kept.values())


def num_bytes(plan: str) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors(plan))


def watched_step(footprint: Footprint, model: GPT, update: Callable[[], object]) -> None:
    """Forward and backward of the blocks, and an update, with their memory watched."""
    with footprint.step():
        with record_function(FORWARD):
            y = run(model)
        with record_function(BACKWARD):
            y.sum().backward()
        footprint.note()
        update()


def gradients_of(model: GPT) -> list[Tensor]:
    """Those that are there."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@cache
def peaks(plan: str, layers: int, ffn_dim: int = 4 * DIM) -> tuple[int, int]:
    """Bytes beside parameters and gradients when the forward has ended, and at most in the backward."""
    model = make_model(plan, layers, ffn_dim=ffn_dim)
    owners: Owners = {"parameters": model.parameters, "gradients": lambda: gradients_of(model)}
    footprint = Footprint(torch.device("cpu"), owners, num_steps=1)
    watched_step(footprint, model, update=lambda: None)
    footprint.measured()
    (moments,) = footprint.steps
    sizes = [(m.phase, m.held["activations"] + m.held["temporaries"]) for m in moments]
    forward, backward = ([size for phase, size in sizes if phase == name] for name in (FORWARD, BACKWARD))
    return forward[-1], max(backward)


@pytest.mark.parametrize("plan", CKPT)
def test_losses_and_gradients_are_bitwise_the_same(plan: str) -> None:
    found = []
    for each in ("none", plan):
        model = make_model(each, dropout=0.1)
        torch.manual_seed(7)
        loss = model(*tokens())
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for plain, recomputed in zip(*found):
        assert plain is not None
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(("preset", "dropout"), [("gpt2", 0.0), ("gpt2", 0.1), ("llama3_8b", 0.0)])
@pytest.mark.parametrize(
    ("plan", "forwards"), [("none", 0.0), ("full", 1.0), ("sqrt", 1.0), ("sqrt_deep", 2.5), ("selective", 0.0)]
)
def test_so_much_is_computed_again(plan: str, forwards: float, preset: str, dropout: float) -> None:
    """At most so many forwards of the blocks; sqrt_deep: (sqrt(L)+1)/2. And what HFU counts is what is computed."""
    sizes = {"dropout": dropout, "ffn_dim": 4 * DIM, "kv_heads": 4}

    def step(plan: str) -> int:
        model = make_model(plan, 16, preset, **sizes)
        return total_flops(lambda: run(model).sum().backward())

    model = make_model("none", 16, preset, **sizes)
    forward = total_flops(lambda: run(model))
    again = step(plan) - step("none")
    assert again <= forwards * forward
    # Torch's counter does not see flash attention on a CPU, and counts the other kind as if it were not causal. In our
    # convention that is as with sequences of -1 and of 2T - 1 tokens.
    num_tokens, lengths = BATCH * SEQ_LEN, (-1, 2 * SEQ_LEN - 1)
    (counted,) = (t for t in lengths if 16 * num_tokens * block_flops_per_token(model.config, t) == forward)
    assert again == num_tokens * recomputed_flops_per_token(model.config, counted, plan, [16])


@pytest.mark.parametrize(("plan", "checkpoints"), [("full", 16), ("sqrt", 4), ("sqrt_deep", 4)])
def test_a_plan_keeps_its_checkpoints_and_nothing_else(plan: str, checkpoints: int) -> None:
    assert [tuple(x.shape) for x in saved_tensors(plan) if x.dim() > 1] == [HIDDEN] * checkpoints


def test_what_plans_keep() -> None:
    assert num_bytes("full") <= 0.15 * num_bytes("none")
    assert num_bytes("sqrt") < num_bytes("full")


@pytest.mark.parametrize("ffn_dim", [4 * DIM, DIM // 4])
@pytest.mark.parametrize("layers", [16, 64])
@pytest.mark.parametrize("plan", ["full", "sqrt", "sqrt_deep"])
def test_most_that_is_held_at_a_time_with_what_is_computed_again(plan: str, layers: int, ffn_dim: int) -> None:
    """What the plan keeps, the blocks that run again at once, and what any backward needs beside."""
    plain, plain_peak = peaks("none", layers, ffn_dim)
    kept, peak = peaks(plan, layers, ffn_dim)
    again = sqrt(layers) if plan == "sqrt" else 1
    assert peak <= kept + again * plain / layers + (plain_peak - plain)


def test_what_plans_hold_of_sixteen_layers() -> None:
    plain, _ = peaks("none", 16)
    assert plain == num_bytes("none") + OUTPUT  # the profiler sees what the hooks see, and what comes out
    assert peaks("sqrt", 16)[1] <= 2 / sqrt(16) * plain
    assert peaks("full", 16)[0] < peaks("selective", 16)[0] < plain


def test_segments_pay_in_deep_models_whose_blocks_save_little() -> None:
    """full holds L inputs and one block, sqrt holds sqrt(L) inputs and sqrt(L) blocks, sqrt_deep sqrt(L) and one."""
    narrow = DIM // 4
    assert peaks("full", 16)[1] < peaks("sqrt", 16)[1]
    assert peaks("full", 16, narrow)[1] < peaks("sqrt", 16, narrow)[1]
    assert peaks("sqrt", 64, narrow)[1] < peaks("full", 64, narrow)[1]
    assert peaks("sqrt_deep", 64)[1] < min(peaks("sqrt", 64)[1], peaks("full", 64)[1])


class Random(nn.Module):
    """A block that draws at random what `selective` keeps, then what it would not, were it not random."""

    def forward(self, x: Tensor, rotation: None) -> Tensor:
        y = x * torch.rand_like(x)
        return torch.native_dropout(torch.sin(y), 0.5, True)[0] * y


def test_what_is_drawn_after_kept_attention_is_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "KEPT", {"aten.rand_like.default"})  # in the place of attention with its dropout
    found = []
    for plan in ("none", "selective"):
        model = make_model("none", layers=1)
        model.blocks["0"] = Random()
        apply_recompute(model, plan)
        torch.manual_seed(1)
        x = torch.linspace(1, 2, 1000).requires_grad_()
        model.run_blocks(list(model.blocks.values()), x, None).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(found[0], found[1])
