"""The training loop. It knows tokens, steps and losses; how the model lies over ranks is the model's business."""

import hashlib
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.profiler import record_function

from data.corpus import Corpus
from data.stream import next_place, rank_batch
from memory.footprint import OPTIMIZER, Footprint, draw_footprint
from parallelism.distributed_model import DistributedModel, MicroBatch
from parallelism.schedules import SCHEDULES
from parallelism.stop import Stop
from parallelism.timeline import Span, bubble, draw, on_paper
from training.batch_control import BatchControl
from training.evaluate import evaluate, micro_batches
from training.job import Job
from training.metrics import Sink, StepMetrics
from training.optimizer import Optimizer, set_lr
from training.schedule import BatchSchedule, batch_at, lengths_at, lr_at, reached
from training.schedule_picture import draw_schedule, draw_speed


def train(
    job: Job,
    model: DistributedModel,
    optimizer: Optimizer,
    corpus: Corpus,
    control: BatchControl,
    footprint: Footprint,
    metrics: StepMetrics,
    sinks: Sequence[Sink],
    device: torch.device,
    stop: Stop,
) -> int:
    """Trains to the last step of the job, or to the end of the step in which a rank was asked to stop.

    Returns the number of the signal that asked, or 0. RuntimeError: the loss is not finite any more.
    """
    step, tokens, every, signal_number = 0, 0, job.config.train.eval_every, 0
    stop()  # from here on a signal ends the run after its step, no longer at once
    while tokens < job.budget.total_tokens and not signal_number:
        began = time.perf_counter()
        step += 1
        model.watch(step == job.config.train.timeline_step)
        shape, lr = job.shape_of(batch_at(tokens, control.schedule)), lr_at(tokens, job.lr, control.schedule)
        set_lr(optimizer, lr)
        torch.manual_seed(_dropout_seed(job.config.seed, tokens, model.dropout_part))
        with footprint.step():
            own = own_sequences(job, corpus, tokens, control.schedule, model.data_part, device)
            loss, halves = model.step_in_halves(own) if control.due(step) else (model.step(own), None)
            grad_norm = model.clip_grad_norm(job.config.train.clip)
            footprint.note()
            with record_function(OPTIMIZER):
                optimizer.step()
                optimizer.zero_grad()
        tokens += shape.tokens
        decision = control.measure(model, halves, float(grad_norm), tokens) if halves else None

        line = metrics.line(
            step=step,
            tokens=tokens,
            shape=shape,
            loss=float(loss),
            grad_norm=float(grad_norm),
            lr=lr,
            seconds=time.perf_counter() - began,
            noise_scale=control.noise.scale,
            memory=footprint.measured(),  # after the clock has stopped
        )
        for sink in sinks:
            sink.record(line)
        check_finite("loss", line["loss"], step)
        if decision:
            for sink in sinks:
                sink.record({"step": step, "tokens": tokens, **decision})
        if step == job.config.train.timeline_step:
            show_timeline(job, model.timeline(), sinks)
        if step == job.config.train.footprint_steps:
            show_footprint(job, footprint, sinks)
        (signal_number,) = model.largest(stop())
        if not signal_number and (tokens >= job.budget.total_tokens or (every and step % every == 0)):
            eval_loss = evaluate(shape, model, corpus.scored(job.config.train.eval_tokens), device)
            for sink in sinks:
                sink.record({"step": step, "tokens": tokens, "eval_loss": eval_loss})
            check_finite("eval_loss", eval_loss, step)
    show_schedule(job, control, tokens, sinks)
    return signal_number


def show_timeline(job: Job, spans: Sequence[Span], sinks: Sequence[Sink]) -> None:
    """Gives the sinks the picture of a pipeline's step; does nothing without one."""
    if spans:
        parallel, p, m = job.config.parallel, job.layout.pp, 1 + max(span.slot.micro_batch for span in spans)
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


def show_schedule(job: Job, control: BatchControl, tokens: int, sinks: Sequence[Sink]) -> None:
    """Gives the sinks pictures of batch, rate and noise scale, where one of them is not all too plain."""
    if len(control.schedule.stages) > 1 or control.measured:
        title = "batch, noise scale and learning rate"
        for sink in sinks:
            sink.picture(
                "schedule",
                title,
                lambda path: draw_schedule(control.schedule, job.lr, tokens, control.measured, path, title),
            )
    if control.measured:
        noise_scale = control.measured[-1][1]
        sizes = [stage.tokens for stage in reached(tokens, control.schedule)]
        speeds = f"what larger batches would give, at the last noise scale of {noise_scale:,.0f} tokens"
        for sink in sinks:
            sink.picture("speed", speeds, lambda path: draw_speed(noise_scale, sizes, path, speeds))


def check_finite(name: str, value: float, step: int) -> None:
    """RuntimeError where a loss is infinite or not a number: no later step would mend the weights."""
    if not math.isfinite(value):
        raise RuntimeError(f"the {name} of step {step} is {value}: a lower lr.peak or train.clip may help")


def own_sequences(
    job: Job, corpus: Corpus, tokens: int, batch: BatchSchedule, data_part: tuple[int, int], device: torch.device
) -> list[MicroBatch]:
    """This rank's share of the step that begins after `tokens` tokens, in micro-batches."""
    shape = job.shape_of(batch_at(tokens, batch))
    lengths, place = lengths_at(tokens, batch), 0
    for (begin, seq_len), (end, _) in pairwise(lengths):
        place = next_place(place, end - begin, seq_len, corpus.train.stretch)
    sequences = (job.config.seed, tokens, shape.num_sequences, shape.seq_len)
    inputs, targets = rank_batch(corpus.train, *sequences, *data_part, begin=lengths[-1][0], place=place)
    return micro_batches(inputs, targets, shape.micro_batch, device)


def _dropout_seed(seed: int, tokens: int, part: int) -> int:
    """Dropout follows from the seed and the tokens consumed, so that a resumed run drops what it would have."""
    return int.from_bytes(hashlib.blake2b(f"dropout {seed} {tokens} {part}".encode(), digest_size=7).digest())
