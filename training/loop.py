"""The training loop. It knows tokens, steps and losses; how the model lies over ranks is the model's business."""

import hashlib
import math
import time
from collections.abc import Sequence

import torch
from torch.profiler import record_function

from data.corpus import Corpus
from data.stream import rank_batch
from memory.footprint import OPTIMIZER, Footprint, draw_footprint
from parallelism.distributed_model import DistributedModel, MicroBatch
from parallelism.schedules import SCHEDULES
from parallelism.stop import Stop
from parallelism.timeline import Span, bubble, draw, on_paper
from training.evaluate import evaluate, micro_batches
from training.job import Job
from training.metrics import Sink, StepMetrics
from training.optimizer import Optimizer, set_lr
from training.schedule import lr_at


def train(
    job: Job,
    model: DistributedModel,
    optimizer: Optimizer,
    corpus: Corpus,
    footprint: Footprint,
    metrics: StepMetrics,
    sinks: Sequence[Sink],
    device: torch.device,
    stop: Stop,
) -> int:
    """Trains to the last step of the job, or to the end of the step in which a rank was asked to stop.

    Returns the number of the signal that asked, or 0. RuntimeError: the loss is not finite any more.
    """
    tokens, every = 0, job.config.train.eval_every
    stop()  # from here on a signal ends the run after its step, no longer at once
    for step in range(1, job.steps + 1):
        began = time.perf_counter()
        model.watch(step == job.config.train.timeline_step)
        lr = lr_at(tokens + job.batch.tokens, job.lr)
        set_lr(optimizer, lr)
        torch.manual_seed(_dropout_seed(job.config.seed, tokens, model.dropout_part))
        with footprint.step():
            loss = model.step(_micro_batches(job, corpus, tokens, model.data_part, device))
            grad_norm = model.clip_grad_norm(job.config.train.clip)
            footprint.note()
            with record_function(OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()
        tokens += job.batch.tokens

        line = metrics.line(
            step=step,
            tokens=tokens,
            loss=float(loss),
            grad_norm=float(grad_norm),
            lr=lr,
            seconds=time.perf_counter() - began,
            memory=footprint.measured(),  # after the clock has stopped
        )
        for sink in sinks:
            sink.record(line)
        check_finite("loss", line["loss"], step)
        if step == job.config.train.timeline_step:
            show_timeline(job, model.timeline(), sinks)
        if step == job.config.train.footprint_steps:
            show_footprint(job, footprint, sinks)
        (signal_number,) = model.largest(stop())
        if signal_number:
            return signal_number
        if step == job.steps or (every and step % every == 0):
            eval_loss = evaluate(job, model, corpus.scored(job.config.train.eval_tokens), device)
            for sink in sinks:
                sink.record({"step": step, "tokens": tokens, "eval_loss": eval_loss})
            check_finite("eval_loss", eval_loss, step)
    return 0


def show_timeline(job: Job, spans: Sequence[Span], sinks: Sequence[Sink]) -> None:
    """Gives the sinks the picture of a pipeline's step; does nothing without one."""
    if spans:
        parallel, p, m = job.config.parallel, job.layout.pp, job.batch.num_micro_batches
        name = parallel.pp_schedule
        theory = bubble(on_paper(SCHEDULES[name].orders(p, m, parallel.stages_per_rank)))
        title = f"{name}: {p} ranks, {m} micro-batches; bubble {bubble(spans):.1%} measured, {theory:.1%} in theory"
        for sink in sinks:
            sink.picture("timeline", title, lambda path: draw(spans, path, title))


def show_footprint(job: Job, footprint: Footprint, sinks: Sequence[Sink]) -> None:
    """Gives the sinks the picture of this rank's memory in the steps that were watched; does nothing without any."""
    if not footprint.steps:
        return
    peak = max(moment.total for step in footprint.steps for moment in step) / 2**20
    title = f"memory of rank 0 ({job.layout}): at most {peak:,.0f} MiB on {job.device}"
    for sink in sinks:
        sink.picture("footprint", title, lambda path: draw_footprint(footprint.steps, path, title))


def check_finite(name: str, value: float, step: int) -> None:
    """RuntimeError where a loss is infinite or not a number: no later step would mend the weights."""
    if not math.isfinite(value):
        raise RuntimeError(f"the {name} of step {step} is {value}: a lower lr.peak or train.clip may help")


def _micro_batches(
    job: Job, corpus: Corpus, tokens: int, data_part: tuple[int, int], device: torch.device
) -> list[MicroBatch]:
    """This rank's share of the step that begins after `tokens` tokens."""
    inputs, targets = rank_batch(
        corpus.train, job.config.seed, tokens, job.batch.num_sequences, job.batch.seq_len, *data_part
    )
    return micro_batches(inputs, targets, job.batch.micro_batch, device)


def _dropout_seed(seed: int, tokens: int, part: int) -> int:
    """Dropout follows from the seed and the tokens consumed, so that a resumed run drops what it would have."""
    return int.from_bytes(hashlib.blake2b(f"dropout {seed} {tokens} {part}".encode(), digest_size=7).digest())
