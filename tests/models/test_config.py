"""ModelConfig: what it fills in, what it refuses, and that it is OmegaConf's structured config."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from models.config import ModelConfig
from tests.models.presets import CONF, model_config

PRESETS = sorted(path.stem for path in CONF.glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_complete_and_valid(preset: str) -> None:
    with initialize_config_dir(str(Path(CONF).parent), version_base=None):
        composed = compose(overrides=[f"+model={preset}"]).model
    assert OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), composed)) == model_config(preset)


def test_default_model_can_be_split_eight_by_sixteen() -> None:
    config = model_config("gpt_mini")
    assert config.layers % 16 == 0
    assert config.num_kv_heads % 8 == 0
    assert config.context >= 256


def test_null_means_a_value_worked_out() -> None:
    config = model_config("base", dim=128, heads=8, kv_heads=None, ffn_dim=None, mlp="swiglu")
    assert (config.head_dim, config.num_kv_heads, config.hidden_dim) == (16, 8, 352)
    assert model_config("base", dim=96, mlp="swiglu").hidden_dim == 256  # 8/3 * 96 exactly: not rounded up
    assert model_config("base", dim=128, mlp="gelu").hidden_dim == 512
    assert model_config("base", ffn_dim=100).hidden_dim == 100
    assert model_config("base", kv_heads=2).num_kv_heads == 2


def test_omegaconf_refuses_unknown_keys_and_wrong_types() -> None:
    with pytest.raises(ConfigKeyError):
        model_config("base", hedas=8)
    with pytest.raises(ValidationError):
        model_config("base", layers="many")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 7}, "model.heads=7 does not divide model.dim=128; nearest valid: 4 or 8"),
        ({"heads": 256}, "model.heads=256 does not divide model.dim=128; nearest valid: 64"),
        ({"heads": 256, "positions": "learned"}, "model.heads=256 does not divide model.dim=128; nearest valid: 128"),
        ({"heads": 128}, "model.heads=128 gives heads of odd width 1; model.positions=rope needs an even one; "
                         "nearest valid: 64"),
        ({"dim": 129, "heads": 3}, "model.dim=129 gives heads of odd width 43; model.positions=rope needs an even one; "
                                   "nearest valid: 126 or 132"),
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide model.heads=8; nearest valid: 2 or 4"),
        ({"kv_heads": 0}, "model.kv_heads=0 does not divide model.heads=8; nearest valid: 1"),
        ({"norm": "layrnorm"}, "model.norm=layrnorm is not one of layernorm, rmsnorm; did you mean layernorm?"),
        ({"mlp": "xyz"}, "model.mlp=xyz is not one of gelu, swiglu"),
        ({"positions": "RoPE"}, "model.positions=RoPE is not one of learned, rope; did you mean rope?"),
        ({"dropout": 1.5}, "model.dropout=1.5 must be in [0, 1)"),
        ({"dropout": float("nan")}, "model.dropout=nan must be in [0, 1)"),
        ({"layers": 0}, "model.layers=0 must be at least 1"),
        ({"ffn_dim": 0}, "model.ffn_dim=0 must be at least 1, or null"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be above 0"),
        ({"rope_factor": 0.5}, "model.rope_factor=0.5 must be at least 1 (1 is no scaling)"),
        ({"rope_high_freq": 1.0}, "model.rope_high_freq=1.0 must be above model.rope_low_freq=1.0"),
    ],
)  # fmt: skip
def test_messages_name_key_value_and_what_is_valid(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        model_config("base", **changes)
    assert str(error.value) == message
