import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.flops import block_flops_per_token, flops_per_token
from tests.cli import make_tiny_job
from training.console import bits_per_byte
from training.metrics import MetricsFile, StepMetrics, peak_tflops

MEASURED: dict[str, Any] = {
    "step": 1,
    "tokens": 512,
    "loss": 4.0,
    "grad_norm": 1.0,
    "lr": 1e-3,
    "seconds": 0.25,
    "noise_scale": None,
    "memory": None,
}


def test_rates_follow_from_the_batch_and_the_seconds() -> None:
    job = make_tiny_job("dp=2")
    line = StepMetrics(job, peak_tflops=1e-3).line(shape=job.first_shape, **MEASURED)
    assert line["tokens_per_second"] == 2048
    # 2048 tokens/s over two devices of 1e-3 TFLOP/s = 1e9 FLOP/s each.
    assert line["mfu"] == pytest.approx(2048 / 2 * flops_per_token(job.config.model, 32) / 1e9)
    assert line["tflops_per_device"] == pytest.approx(line["mfu"] * 1e-3)


def test_hfu_counts_what_is_computed_twice() -> None:
    """All of a block but its last matrix, of 2 layers; with selective nothing."""
    job = make_tiny_job("memory=ckpt")
    line = StepMetrics(job, peak_tflops=1e-3).line(shape=job.first_shape, **MEASURED)
    again = 2 * (block_flops_per_token(job.config.model, 32) - 2 * 32 * job.config.model.hidden_dim)
    assert line["hfu"] / line["mfu"] == pytest.approx(1 + again / flops_per_token(job.config.model, 32))
    line = StepMetrics(make_tiny_job("memory.ckpt=selective"), peak_tflops=1e-3).line(shape=job.first_shape, **MEASURED)
    assert line["hfu"] == line["mfu"] > 0


def test_what_is_not_known_is_null() -> None:
    job = make_tiny_job()
    line = StepMetrics(job, None).line(shape=job.first_shape, **MEASURED)
    assert {key for key, value in line.items() if value is None} == {"mfu", "hfu", "noise_scale", "memory"}


def test_peak_is_the_setting_or_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert peak_tflops(123, cpu, "fp32") == 123.0
    assert peak_tflops("auto", cpu, "bf16") is None
    for name, known in {"NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA GeForce 256": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops("auto", gpu, "bf16") == known
    assert peak_tflops("auto", gpu, "fp32") is None


def test_every_line_is_valid_json_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.record({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    file.record({"step": 2, "loss": 1.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": None, "grad_norm": None},
        {"step": 2, "loss": 1.5},
    ]


def test_bits_per_byte_do_not_depend_on_the_tokenizer() -> None:
    # A uniform model over bytes has 8 bits per byte, however many bytes a token stands for.
    assert bits_per_byte(nats_per_token=5.545177444479562, bytes_per_token=1) == pytest.approx(8)
    assert bits_per_byte(nats_per_token=4 * 5.545177444479562, bytes_per_token=4) == pytest.approx(8)
