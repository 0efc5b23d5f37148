"""Every setting of a run, typed. Each room owns the dataclass of its group; `Config` collects them. Imports no torch.

Defaults live in conf/, and only there: a dataclass says what a key is, its YAML says what it starts as.
"""

from dataclasses import dataclass

from omegaconf import OmegaConf

from checks import at_least, at_most, number_or_auto, one_of
from data.config import DataConfig
from memory.config import MemoryConfig
from models.config import ModelConfig
from parallelism.layout import ParallelConfig
from training.schedule import SHAPES

# train.steps has its default only where train.tokens is not given: conf/config.yaml says it by this.
OmegaConf.register_new_resolver("unless", lambda other, default: default if other is None else None, replace=True)


@dataclass
class BatchConfig:
    """Keys of the `batch` group."""

    tokens: int
    seq_len: int

    def __post_init__(self) -> None:
        at_least("batch", self, 1, "tokens", "seq_len")


@dataclass
class LrConfig:
    """Keys of the `lr` group."""

    shape: str
    peak: float
    final: float
    warmup_tokens: int | str
    decay_tokens: int | str

    def __post_init__(self) -> None:
        one_of("lr.shape", self.shape, SHAPES)
        at_least("lr", self, 0, "peak", "final")
        if self.final > self.peak:
            raise ValueError(f"lr.final={self.final} is above lr.peak={self.peak}; valid: lr.final <= {self.peak}")
        number_or_auto("lr.warmup_tokens", self.warmup_tokens)
        number_or_auto("lr.decay_tokens", self.decay_tokens)


@dataclass
class OptimConfig:
    """Keys of the `optim` group."""

    betas: list[float]
    eps: float
    weight_decay: float

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={self.betas} must be two numbers in [0, 1), such as [0.9,0.95]")
        at_least("optim", self, 0, "eps", "weight_decay")


@dataclass
class LoggerConfig:
    """Keys of the `logger` group."""

    name: str
    project: str
    entity: str | None
    run_name: str | None
    group: str | None
    tags: list[str]
    mode: str

    def __post_init__(self) -> None:
        one_of("logger.name", self.name, ("wandb", "none"))
        one_of("logger.mode", self.mode, ("auto", "online", "offline"))


@dataclass
class ClusterConfig:
    """Keys of the `cluster` group."""

    peak_tflops: int | float | str
    devices_per_node: int | str
    timeout_minutes: float

    def __post_init__(self) -> None:
        number_or_auto("cluster.peak_tflops", self.peak_tflops)
        number_or_auto("cluster.devices_per_node", self.devices_per_node, least=1)
        at_least("cluster", self, 0.1, "timeout_minutes")
        at_most("cluster", self, 1e6, "timeout_minutes")


@dataclass
class TrainConfig:
    """Keys under `train`."""

    steps: int | None
    tokens: int | None
    clip: float
    eval_every: int
    eval_tokens: int | None
    sample_tokens: int
    timeline_step: int
    footprint_steps: int
    memory_profile: bool

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            both = f"train.steps={self.steps} and train.tokens={self.tokens}"
            raise ValueError(f"{both}: exactly one of them says when to stop; valid: train.steps=200 train.tokens=null")
        at_least("train", self, 1, "steps", "tokens", "eval_tokens")
        at_least("train", self, 0, "eval_every", "sample_tokens", "timeline_step", "footprint_steps")
        if not self.clip > 0:
            raise ValueError(f"train.clip={self.clip} must be above 0; train.clip=inf never clips")


@dataclass
class Config:
    """The whole of it, in the order of conf/config.yaml."""

    model: ModelConfig
    parallel: ParallelConfig
    memory: MemoryConfig
    data: DataConfig
    batch: BatchConfig
    lr: LrConfig
    optim: OptimConfig
    logger: LoggerConfig
    cluster: ClusterConfig
    train: TrainConfig
    dp: int | str
    dp_shard: int | str
    tp: int
    pp: int
    cp: int
    ep: int
    device: str
    precision: str
    compile: bool
    seed: int

    def __post_init__(self) -> None:
        one_of("device", self.device, ("auto", "cpu", "cuda"))
        one_of("precision", self.precision, ("auto", "fp32", "bf16"))
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be in [0, 2**63)")
