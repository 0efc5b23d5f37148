"""What a step is worth in numbers, and the file they go to."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from memory.micro_batch import BatchShape
from memory.plans import recomputed_flops_per_token
from models.flops import flops_per_token
from training.job import Job

# Dense bf16 TFLOP/s of one device, from the vendors' data sheets; the first name that the device's contains is taken.
BF16_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
}


class Sink(Protocol):
    """Where metrics go: a file, a tracker, a terminal."""

    def record(self, metrics: dict[str, Any]) -> None:
        """Takes the metrics of a step, of an evaluation (which has eval_loss) or of a decision (next_batch_tokens)."""

    def picture(self, name: str, title: str, draw: Callable[[Path], None]) -> None:
        """Takes a picture, which `draw` writes to a path."""

    def finish(self) -> None:
        """Nothing more will come."""


class MetricsFile:
    """metrics.jsonl: one JSON object a line, whole even after kill -9, for each line is a single write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(self, metrics: dict[str, Any]) -> None:
        """Appends a line; what is not finite is null, since JSON has no word for it."""
        known = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in metrics.items()}
        os.write(self._file, (json.dumps(known) + "\n").encode())

    def picture(self, name: str, title: str, draw: Callable[[Path], None]) -> None:
        """Writes NAME.png beside it."""
        draw(self._folder / f"{name}.png")

    def finish(self) -> None:
        """Closes the file."""
        os.close(self._file)


@dataclass(frozen=True)
class StepMetrics:
    """Turns a step's measurements into the line that metrics.jsonl, W&B and the terminal get."""

    job: Job
    peak_tflops: float | None  # of one device; None: unknown, and so is MFU

    def line(
        self,
        *,
        step: int,
        tokens: int,
        shape: BatchShape,
        loss: float,
        grad_norm: float,
        lr: float,
        seconds: float,
        noise_scale: float | None,
        memory: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """One step: loss in nats per token, norm before clipping, noise scale in tokens, memory of rank 0."""
        layout, model = self.job.layout, self.job.config.model
        stages = self.job.config.parallel.pp_split
        rate = shape.tokens / seconds
        needed = flops_per_token(model, shape.seq_len)
        again = recomputed_flops_per_token(model, shape.seq_len, self.job.config.memory.ckpt, stages)
        tflops = rate * needed / layout.world_size / 1e12
        mfu = tflops / self.peak_tflops if self.peak_tflops else None
        return {
            "step": step,
            "tokens": tokens,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "batch_tokens": shape.tokens,
            "seq_len": shape.seq_len,
            "micro_batches": shape.num_micro_batches,
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "tflops_per_device": tflops,
            "mfu": mfu,
            "hfu": mfu * (needed + again) / needed if mfu is not None else None,
            "noise_scale": noise_scale,
            "memory": memory,
        }


def peak_tflops(setting: float | str, device: torch.device, precision: str) -> float | None:
    """TFLOP/s of one device at best: the setting, or by the GPU's name in bf16; None where it isn't known."""
    if not isinstance(setting, str):
        return float(setting)
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops for known, tflops in BF16_TFLOPS.items() if known in name), None)
