"""Every setting of a run, typed. Each room owns the dataclass of its group; `Config` collects them. Imports no torch.

Defaults live in conf/, and only there: a dataclass says what a key is, its YAML says what it starts as.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from omegaconf import OmegaConf

from checks import at_least, at_most, number_or_auto, one_of
from data.config import DataConfig
from memory.config import MemoryConfig
from models.config import ModelConfig
from parallelism.layout import ParallelConfig
from training.schedule import SCALINGS, SHAPES, UNITS

# train.steps has its default only where train.tokens is not given: conf/config.yaml says it by this.
OmegaConf.register_new_resolver("unless", lambda other, default: default if other is None else None, replace=True)


MOST_TOKENS = 2**40  # of a step: 60,000 times Llama 3's
MOST_SCALE = 1000.0


@dataclass
class StageConfig:
    """One row of batch.stages."""

    from_tokens: int
    tokens: int
    seq_len: int
    lr_factor: float = 1.0


@dataclass
class BatchConfig:
    """Keys of the `batch` group."""

    tokens: int | None
    seq_len: int | None
    stages: list[StageConfig]
    scale: float
    double_to: int | None
    double_below: float
    double_after: int

    def __post_init__(self) -> None:
        at_least("batch", self, 1, "tokens", "seq_len", "double_to", "double_after")
        at_most("batch", self, MOST_TOKENS, "tokens", "seq_len", "double_to")
        if not 0 < self.scale <= MOST_SCALE:
            raise ValueError(f"batch.scale={self.scale} must be above 0, and at most {MOST_SCALE}; 1e-3 shrinks a run")
        if not 0 < self.double_below < inf:
            raise ValueError(f"batch.double_below={self.double_below} must be above 0, and finite")
        sizes = f"batch.tokens={self.tokens} batch.seq_len={self.seq_len}"
        if not self.stages and (self.tokens is None or self.seq_len is None):
            raise ValueError(f"{sizes}, and batch.stages is empty; valid: both numbers, or batch=ramp")
        if self.stages and not (self.tokens is None and self.seq_len is None):
            raise ValueError(
                f"{sizes} beside {len(self.stages)} batch.stages, which have their own; valid: batch=constant "
                "batch.stages=[] with those, or batch=ramp batch.stages=[...] without"
            )
        for number, stage in enumerate(self.stages):
            at_least(f"batch.stages.{number}", stage, 0, "from_tokens", "lr_factor")
            at_least(f"batch.stages.{number}", stage, 1, "tokens", "seq_len")
            at_most(f"batch.stages.{number}", stage, MOST_TOKENS, "tokens", "seq_len")
        thresholds = [stage.from_tokens for stage in self.stages]
        if thresholds and (thresholds[0] != 0 or any(a >= b for a, b in pairwise(thresholds))):
            raise ValueError(f"from_tokens of batch.stages are {thresholds}; valid: 0 first, each above the one before")
        if self.double_to is not None and (self.stages or self.double_to < (self.tokens or 0)):
            raise ValueError(
                f"batch.double_to={self.double_to} is how far batch=noise_scale doubles batch.tokens={self.tokens}; "
                "valid: at least batch.tokens, and no batch.stages"
            )


@dataclass
class LrConfig:
    """Keys of the `lr` group."""

    shape: str
    peak: float
    final: float
    unit: str
    warmup_tokens: int | str
    decay_tokens: int | str
    end_tokens: int | str
    batch_scaling: str
    batch_ref: int | str

    def __post_init__(self) -> None:
        one_of("lr.shape", self.shape, SHAPES)
        at_least("lr", self, 0, "peak", "final")
        if self.final > self.peak:
            raise ValueError(f"lr.final={self.final} is above lr.peak={self.peak}; valid: lr.final <= {self.peak}")
        one_of("lr.unit", self.unit, UNITS)
        number_or_auto("lr.warmup_tokens", self.warmup_tokens)
        number_or_auto("lr.decay_tokens", self.decay_tokens)
        number_or_auto("lr.end_tokens", self.end_tokens, least=1)
        one_of("lr.batch_scaling", self.batch_scaling, SCALINGS)
        number_or_auto("lr.batch_ref", self.batch_ref, least=1)


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
class NoiseConfig:
    """Keys under `noise`."""

    every: int

    def __post_init__(self) -> None:
        at_least("noise", self, 0, "every")


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
            raise ValueError(f"{both}: exactly one of them says when to stop; valid: null for the other")
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
    noise: NoiseConfig
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
