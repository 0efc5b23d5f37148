"""The decoder against transformers' GPT-2 and Llama, and the seams that layouts rely on."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from models.gpt import GPT, AttentionCore, Block
from tests.models.presets import model_config

SMALL: dict[str, Any] = {"layers": 3, "dim": 32, "heads": 4, "vocab_size": 64, "context": 64}
GPT2: dict[str, Any] = {"norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True}
SCALED: dict[str, Any] = {"rope_factor": 8.0, "rope_low_freq": 1.0, "rope_high_freq": 4.0, "rope_original_context": 16}
families = pytest.mark.parametrize("family", [{"kv_heads": 2}, GPT2], ids=["llama", "gpt2"])

# Our module names to theirs; "{}" is the number of the block.
LLAMA_NAMES = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "model.layers.{}.input_layernorm", "mlp_norm": "model.layers.{}.post_attention_layernorm",
    "attention.q": "model.layers.{}.self_attn.q_proj", "attention.k": "model.layers.{}.self_attn.k_proj",
    "attention.v": "model.layers.{}.self_attn.v_proj", "attention.out": "model.layers.{}.self_attn.o_proj",
    "mlp.up": "model.layers.{}.mlp.up_proj", "mlp.gate": "model.layers.{}.mlp.gate_proj",
    "mlp.down": "model.layers.{}.mlp.down_proj",
}  # fmt: skip
GPT2_NAMES = {
    "embedding": "transformer.wte", "position_embedding": "transformer.wpe", "norm": "transformer.ln_f",
    "attention_norm": "transformer.h.{}.ln_1", "mlp_norm": "transformer.h.{}.ln_2",
    "attention.q": "transformer.h.{}.attn.q", "attention.k": "transformer.h.{}.attn.k",
    "attention.v": "transformer.h.{}.attn.v", "attention.out": "transformer.h.{}.attn.c_proj",
    "mlp.up": "transformer.h.{}.mlp.c_fc", "mlp.down": "transformer.h.{}.mlp.c_proj",
}  # fmt: skip


def make_model(**changes: Any) -> GPT:
    model = GPT(model_config("base", **{**SMALL, **changes}))
    model.init_weights(0)
    randomise(model)
    return model.eval()


def randomise(model: nn.Module) -> None:
    """Move every parameter, also the norms and biases that start at 1 and 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def some_tokens(batch: int = 2, time: int = 48, seed: int = 2) -> Tensor:
    return torch.randint(64, (batch, time), generator=torch.Generator().manual_seed(seed))


def copy_weights(model: GPT, state: dict[str, Tensor], names: dict[str, str]) -> GPT:
    """Fill `model` with another's weights, and see that none of them is left over."""
    used = set()
    for name, parameter in model.named_parameters():
        module, kind = name.rsplit(".", 1)
        number = ""
        if module.startswith("blocks."):
            _, number, module = module.split(".", 2)
        theirs = f"{names[module].format(number)}.{kind}"
        used.add(theirs)
        parameter.data.copy_(state[theirs])
    assert used == {name for name in state if name != "lm_head.weight" or not model.config.tie_embeddings}
    return model


def gpt2_state(theirs: nn.Module) -> dict[str, Tensor]:
    """Their state with q, k and v apart and the matrices of the blocks as (out, in)."""
    state: dict[str, Tensor] = {}
    for name, value in theirs.state_dict().items():
        if ".h." in name and name.endswith(".weight") and ".ln_" not in name:
            value = value.T
        if "c_attn" in name:
            state |= {name.replace("c_attn", key): part for key, part in zip("qkv", value.chunk(3))}
        else:
            state[name] = value
    return state


def test_logits_are_those_of_gpt2() -> None:
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=3, n_head=4)).eval()
    randomise(theirs)
    model = copy_weights(make_model(**GPT2), gpt2_state(theirs), GPT2_NAMES)
    torch.testing.assert_close(model(some_tokens()), theirs(some_tokens()).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_llama(tied: bool) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    rope = {"rope_type": "llama3", "rope_theta": 1000.0, **scaling}
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=tied))
    randomise(theirs)
    expected = theirs.eval()(some_tokens()).logits

    shape = {"kv_heads": 2, "ffn_dim": 96, "rope_theta": 1000.0, "tie_embeddings": tied}
    model = copy_weights(make_model(**shape, **SCALED), theirs.state_dict(), LLAMA_NAMES)
    torch.testing.assert_close(model(some_tokens()), expected, rtol=0, atol=1e-5)
    unscaled = copy_weights(make_model(**shape), theirs.state_dict(), LLAMA_NAMES)
    assert (unscaled(some_tokens()) - expected).abs().max() > 1e-2


@families
def test_a_later_token_changes_no_earlier_logits(family: dict[str, Any]) -> None:
    model, tokens = make_model(**family), some_tokens()
    changed = tokens.clone()
    changed[:, 30] = (changed[:, 30] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :30], before[:, :30], rtol=0, atol=1e-6)
    assert ((after - before)[:, 30:].abs().amax(-1) > 1e-4).all()


@families
def test_stages_in_a_chain_are_the_whole(family: dict[str, Any]) -> None:
    model, tokens = make_model(**family), some_tokens()
    first, middle, last = (copy.deepcopy(model) for _ in range(3))
    for stage, mine in ((first, "0"), (middle, "1"), (last, "2")):
        for index in {"0", "1", "2"} - {mine}:
            del stage.blocks[index]
    first.norm = first.head = middle.embedding = middle.position_embedding = middle.norm = middle.head = None
    last.embedding = last.position_embedding = None
    assert set(last.state_dict()) < set(model.state_dict())
    hidden = middle(first(tokens))
    assert hidden.shape == (2, 48, 32)
    torch.testing.assert_close(last(hidden), model(tokens), rtol=0, atol=0)
    torch.testing.assert_close(last(hidden, tokens), model(tokens, tokens), rtol=0, atol=0)


def test_positions_default_to_the_column() -> None:
    for family in ({}, GPT2):
        model = make_model(**family)
        torch.testing.assert_close(model(some_tokens(), positions=torch.arange(48)), model(some_tokens()))


def test_learned_positions_look_up_their_row() -> None:
    model, tokens = make_model(**GPT2), some_tokens()
    before, shifted = model(tokens), model(tokens, positions=torch.arange(16, 64))
    assert (before - shifted).abs().max() > 1e-2
    assert model.position_embedding is not None
    model.position_embedding.weight.data = model.position_embedding.weight.data.roll(-16, 0)
    torch.testing.assert_close(model(tokens), shifted)


def test_rope_sees_only_distances() -> None:
    model, tokens = make_model(kv_heads=2, **SCALED), some_tokens()
    torch.testing.assert_close(model(tokens, positions=torch.arange(1000, 1048)), model(tokens), rtol=0, atol=1e-4)
    assert (model(tokens, positions=torch.arange(0, 96, 2)) - model(tokens)).abs().max() > 1e-2


@families
def test_attention_core_can_be_replaced(family: dict[str, Any]) -> None:
    """What a core is given: heads second, keys and values with their own number of heads."""

    class Written(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            assert q.shape == (2, 4, 48, 8)
            assert k.shape == v.shape == (2, family.get("kv_heads", 4), 48, 8)
            k, v = (x.repeat_interleave(4 // x.shape[1], dim=1) for x in (k, v))  # (B, H, T, D)
            scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
            return scores.softmax(-1) @ v

    model = make_model(**family)
    expected = model(some_tokens())
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.core = Written()
    torch.testing.assert_close(model(some_tokens()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_cross_entropy(dtype: torch.dtype) -> None:
    """Also where targets are -100: those rows count nowhere, whatever their logits are."""
    logits = (3 * torch.randn(3, 11, 64)).to(dtype).requires_grad_()
    targets = some_tokens(3, 11)
    targets[0, :5] = targets[2] = -100
    targets[1, :2] = torch.tensor([0, 63])
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")
    (gradient,) = torch.autograd.grad(expected / 17, logits)

    ours = logits.detach().clone().requires_grad_()
    loss = make_model().loss(ours, targets)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    (loss / 17).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, gradient, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-8)
    assert not ours.grad[2].any()


def test_model_loss_is_the_sum_over_valid_targets() -> None:
    model, tokens, targets = make_model(), some_tokens(), some_tokens(seed=3)
    targets[:, 40:] = -100
    expected = F.cross_entropy(model(tokens)[:, :40].flatten(0, 1), targets[:, :40].flatten(), reduction="sum")
    torch.testing.assert_close(model(tokens, targets), expected)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, targets), expected)
    targets[:] = -100
    loss = model(tokens, targets)
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@families
def test_bf16_autocast_stays_near_fp32(family: dict[str, Any]) -> None:
    model, tokens = make_model(**family), some_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = model(tokens, tokens)
    assert logits.isfinite().all()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model(tokens, tokens), rtol=1e-2, atol=0)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("place", ["embedding", "attention", "residual"])
def test_dropout_in_three_places_and_only_in_training(place: str) -> None:
    model, tokens = make_model(dropout=0.5), some_tokens()
    if place != "embedding":
        model.dropout.p = 0.0
    for block in model.blocks.values():
        assert isinstance(block, Block)
        if place != "attention":
            block.attention.core = AttentionCore(0.0)
        if place != "residual":
            block.dropout.p = 0.0
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@families
def test_compiled_blocks_give_the_same(family: dict[str, Any]) -> None:
    model, tokens = make_model(**family), some_tokens()
    expected = model(tokens)
    names = [name for name, _ in model.named_parameters()]
    for block in model.blocks.values():
        block.compile(backend="aot_eager")
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    model(tokens, tokens).backward()
    assert names == [name for name, parameter in model.named_parameters() if parameter.grad is not None]
