"""The real presets of conf/model, read without the rest of the configuration."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from models.config import ModelConfig

CONF = Path(__file__).parents[2] / "conf" / "model"


def model_config(preset: str, **changes: object) -> ModelConfig:
    """The preset as `model=preset` gives it, with some keys changed."""
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), _load(preset), changes)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    return config


def _load(preset: str) -> DictConfig:
    """The file after those that its defaults list names; `_self_`, the file itself, always comes last."""
    own = OmegaConf.load(CONF / f"{preset}.yaml")
    assert isinstance(own, DictConfig)
    parents = [name for name in own.pop("defaults", []) if name != "_self_"]
    merged = OmegaConf.merge(*map(_load, parents), own)
    assert isinstance(merged, DictConfig)
    return merged
