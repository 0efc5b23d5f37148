"""Scoring the held-out tokens, the same ones on every layout."""

import numpy as np
import torch

from data.held_out import IGNORED, held_out_windows
from memory.micro_batch import AUTO_TOKENS, BatchShape
from parallelism.distributed_model import DistributedModel, MicroBatch


def evaluate(shape: BatchShape, model: DistributedModel, held_out: np.ndarray, device: torch.device) -> float:
    """The loss in nats per held-out token; `held_out` (N,) holds the tokens to score and one before them.

    Sequences are as long as in the steps that have this shape: those just trained on.
    Every rank takes as many windows as the others, in whole micro-batches: windows without a valid target fill up.
    """
    part, num_parts = model.data_part
    seq_len = shape.seq_len
    num_windows = -(-(len(held_out) - 1) // seq_len)
    # Nothing is kept for a backward, so that several micro-batches go through at once.
    size = shape.micro_batch
    size *= max(1, min(shape.num_micro_batches, AUTO_TOKENS // (size * seq_len)))
    share = -(-num_windows // (size * num_parts)) * size  # windows of one rank
    inputs, targets = held_out_windows(held_out[part * share * seq_len : (part + 1) * share * seq_len + 1], seq_len)
    fill = share - len(inputs)
    inputs = np.concatenate((inputs, np.zeros((fill, seq_len), np.int64)))
    targets = np.concatenate((targets, np.full((fill, seq_len), IGNORED, np.int64)))
    return model.evaluate(micro_batches(inputs, targets, size, device))


def micro_batches(inputs: np.ndarray, targets: np.ndarray, size: int, device: torch.device) -> list[MicroBatch]:
    """Cuts (B, T) arrays into pairs of (size, T) tensors on the device."""
    pairs = zip(torch.from_numpy(inputs).split(size), torch.from_numpy(targets).split(size))
    return [(i.to(device, non_blocking=True), t.to(device, non_blocking=True)) for i, t in pairs]
