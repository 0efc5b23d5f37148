"""What a person sees of a run: a banner, a progress bar with its numbers, evaluations, a text sample, the end."""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.corpus import Corpus
from models.flops import flops_per_token, num_parameters
from training.job import Job

PLAIN_SECONDS = 10.0  # where output goes to a file: seconds between two lines of progress


class Terminal:
    """A Sink for people, on stdout: a live bar on a terminal, a line now and then elsewhere."""

    def __init__(self, job: Job, folder: Path, corpus: Corpus) -> None:
        self._job, self._folder = job, folder
        self._bytes_per_token = corpus.bytes_per_token(corpus.scored(job.config.train.eval_tokens)[1:])
        self._console = Console(soft_wrap=True, highlight=False, emoji=False)
        self._printed = time.monotonic()
        self._step = self._tokens = 0
        self._num_steps = job.budget.num_steps
        self._banner(corpus.num_train_tokens)
        columns = [
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ]
        self._progress = Progress(*columns, console=self._console, disable=not sys.stdout.isatty())
        self._bar = self._progress.add_task("", total=job.budget.total_tokens)
        self._progress.start()

    def record(self, metrics: dict[str, Any]) -> None:
        """Moves the bar for a step; prints an evaluation, and a decision on the batch."""
        if "eval_loss" in metrics:
            self._console.print(f"step {metrics['step']}: eval loss {self._with_bits(metrics['eval_loss'])}")
        elif "next_batch_tokens" in metrics:
            self._console.print(
                f"step {metrics['step']}: the noise scale is {metrics['noise_scale']:,.0f} tokens; "
                f"batch {metrics['batch_tokens']:,} -> {metrics['next_batch_tokens']:,} tokens"
            )
        else:
            self._record_step(metrics)

    def _record_step(self, metrics: dict[str, Any]) -> None:
        self._step, self._tokens = metrics["step"], metrics["tokens"]
        of = f"/{self._num_steps}" if self._num_steps else ""
        words = f"step {self._step}{of}: loss {metrics['loss']:.4f}, "
        words += f"{metrics['tokens_per_second']:,.0f} tokens/s"
        if metrics["mfu"] is not None:
            words += f", MFU {metrics['mfu']:.1%}"
        self._progress.update(self._bar, completed=self._tokens, description=words)
        at_an_end = self._step == 1 or self._tokens >= self._job.budget.total_tokens
        if self._progress.disable and (at_an_end or time.monotonic() - self._printed > PLAIN_SECONDS):
            self._console.print(words)
            self._printed = time.monotonic()

    def picture(self, name: str, title: str, draw: Callable[[Path], None]) -> None:
        """Prints what it shows, and where the file is."""
        self._console.print(f"{title}: {self._folder / name}.png")

    def sample(self, text: str) -> None:
        """Prints what the model has written."""
        self._progress.stop()
        self._console.rule("a sample")
        self._console.print(text, markup=False)
        self._console.rule()

    def finish(self) -> None:
        """Says where the results are, and how far the run came if not to its end."""
        self._progress.stop()
        if self._tokens < self._job.budget.total_tokens:
            of = f" of {self._num_steps}" if self._num_steps else ""
            self._console.print(f"stopped after step {self._step}{of}")
        self._console.print(f"results in {self._folder}", markup=False)

    def _banner(self, num_train_tokens: int | None) -> None:
        job, model = self._job, self._job.config.model
        steps, total = job.budget.num_steps, job.budget.total_tokens
        seq_len = max(shape.seq_len for shape in job.shapes.values())
        flops = flops_per_token(model, seq_len)
        epochs = f", {total / num_train_tokens:.2f} epochs of {num_train_tokens:,}" if num_train_tokens else ""
        rows = {
            "model": f"{num_parameters(model):,} parameters, {model.layers} layers of width {model.dim}, "
            f"{flops / 1e6:,.0f} MFLOPs per token",
            "layout": f"{job.layout} on {job.device}, {', '.join(layout_options(job))}",
            **batch_rows(job),
            "run": (f"{steps:,} steps, " if steps else "") + f"{total:,} tokens{epochs}",
            "results": str(self._folder),
        }
        for name, words in rows.items():
            self._console.print(f"{name:8} {words}", markup=False)

    def _with_bits(self, nats: float) -> str:
        """Nats per scored token, and bits per byte beside it where the tokens stand for text."""
        if self._bytes_per_token is None:
            return f"{nats:.4f}"
        return f"{nats:.4f} ({bits_per_byte(nats, self._bytes_per_token):.3f} bits per byte)"


def batch_rows(job: Job) -> dict[str, str]:
    """How each stage cuts its steps, and where it starts; or how far the noise scale may drive the first."""
    keys, budget = job.config.batch, job.budget
    rows = [str(job.shape_of(stage)) for stage in budget.stages]
    if keys.double_to:
        most = max(shape.tokens for shape in job.shapes.values())
        grows = f"doubles, up to {most:,} tokens, while it is below {keys.double_below:g} of the noise scale"
        return {"batch": rows[0], "growth": grows}
    if len(rows) == 1:
        return {"batch": rows[0]}
    starts = enumerate(zip(rows, budget.batch.starts))
    return {f"batch {number}": f"{row}, from {start:,} tokens on" for number, (row, start) in starts}


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """A loss that does not depend on the tokenizer."""
    return nats_per_token / math.log(2) / bytes_per_token


def layout_options(job: Job) -> list[str]:
    """What is chosen beside the degrees, in words; what does nothing here is left out."""
    layout, parallel = job.layout, job.config.parallel
    words = {
        job.precision: True,
        "compiled": job.config.compile,
        "ZeRO-3": layout.dp_shard > 1 and parallel.reshard and layout.pp == 1,
        "ZeRO-2": layout.dp_shard > 1 and (not parallel.reshard or layout.pp > 1),  # a pipeline keeps what it gathers
        "sequence parallel": layout.tp > 1 and parallel.sequence_parallel,
        parallel.cp_method: layout.cp > 1,
        parallel.pp_schedule: layout.pp > 1,
    }
    return [word for word, chosen in words.items() if chosen]
