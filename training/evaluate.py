"""Scoring the held-out tokens, the same ones on every layout."""

import numpy as np
import torch

from data.held_out import held_out_windows
from parallelism.nd import DistributedModel, MicroBatch
from training.job import Job


def evaluate(job: Job, model: DistributedModel, held_out: np.ndarray, device: torch.device) -> float:
    """The loss in nats per held-out token, over the first `train.eval_tokens` of them or all."""
    inputs, targets = held_out_windows(held_out, job.batch.seq_len, job.config.train.eval_tokens)
    part, num_parts = model.data_part
    size = job.batch.micro_batch
    # Every rank runs as many passes as the others: windows without a valid target fill the last round.
    fill = -len(inputs) % (size * num_parts)
    inputs = np.concatenate((inputs, np.zeros((fill, inputs.shape[1]), inputs.dtype)))
    targets = np.concatenate((targets, np.full((fill, targets.shape[1]), -100, targets.dtype)))
    share = slice(part * len(inputs) // num_parts, (part + 1) * len(inputs) // num_parts)
    return model.evaluate(micro_batches(inputs[share], targets[share], size, device))


def micro_batches(inputs: np.ndarray, targets: np.ndarray, size: int, device: torch.device) -> list[MicroBatch]:
    """Cuts (B, T) arrays into pairs of (size, T) tensors on the device."""
    pairs = zip(torch.from_numpy(inputs).split(size), torch.from_numpy(targets).split(size))
    return [(i.to(device, non_blocking=True), t.to(device, non_blocking=True)) for i, t in pairs]
