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
from memory.footprint import BACKWARD, FORWARD, Footprint
from memory.plans import recomputed_flops_per_token
from memory.recompute import apply_recompute
from models.flops import block_flops_per_token
from models.gpt import GPT
from tests.models.presets import model_config

BATCH, SEQ_LEN, DIM = 2, 64, 64
HIDDEN = (BATCH, SEQ_LEN, DIM)


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


@cache
def peaks(plan: str, layers: int, ffn_dim: int = 4 * DIM) -> tuple[int, int]:
    """Bytes beside parameters and gradients when the forward has ended, and at most in the backward."""
    model = make_model(plan, layers, ffn_dim=ffn_dim)
    gradients = lambda: [p.grad for p in model.parameters() if p.grad is not None]  # noqa: E731
    footprint = Footprint(torch.device("cpu"), {"parameters": model.parameters, "gradients": gradients}, num_steps=1)
    with footprint.step():
        with record_function(FORWARD):
            y = run(model)
        with record_function(BACKWARD):
            y.sum().backward()
        footprint.note()
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


def test_most_that_is_held_at_a_time_with_what_is_computed_again() -> None:
    kept, _ = peaks("none", 16)
    assert kept == pytest.approx(num_bytes("none"), rel=0.05)  # the profiler sees what the hooks see
    assert peaks("full", 16)[1] <= 0.25 * kept
    assert peaks("sqrt", 16)[1] <= 2 / sqrt(16) * kept
    assert peaks("full", 16)[0] < peaks("selective", 16)[0] < kept


def test_segments_pay_in_deep_models_whose_blocks_save_little() -> None:
    """full holds L inputs and one block, sqrt holds sqrt(L) inputs and sqrt(L) blocks, sqrt_deep sqrt(L) and one."""
    narrow = DIM // 4
    assert peaks("full", 16)[1] < peaks("sqrt", 16)[1]
    assert peaks("full", 16, narrow)[1] < peaks("sqrt", 16, narrow)[1]
    assert peaks("sqrt", 64, narrow)[1] < peaks("full", 64, narrow)[1]
    assert peaks("sqrt_deep", 64)[1] < 0.5 * min(peaks("sqrt", 64)[1], peaks("full", 64)[1])


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
        found.append(x.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]
