"""One rank's run from start to end: meet the others, build what is needed, train, leave results behind."""

import logging
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from data.corpus import Corpus, load_corpus, prepare_corpus
from data.errors import DataError
from models.gpt import GPT
from parallelism.launch import Stop
from parallelism.mesh import make_mesh, once_per_node, start_process_group
from parallelism.nd import DistributedModel, parallelize
from training.console import Terminal
from training.errors import CANNOT_RUN
from training.job import Job
from training.logger import WandbLogger
from training.loop import train
from training.metrics import MetricsFile, Sink, StepMetrics, peak_tflops
from training.optimizer import make_optimizer
from training.sample import sample


def run(stop: Stop, job: Job, folder: Path | None) -> int:
    """Runs the job in this rank; returns the run's exit code. Rank 0 alone writes to the folder and the terminal."""
    config = job.config
    device = start_process_group(job.device, config.cluster.timeout_minutes)
    folder = folder if dist.get_rank() == 0 else None
    logging.basicConfig(level=logging.INFO if folder else logging.ERROR, format="%(message)s")
    try:
        corpus = open_corpus(job)
    except DataError as error:
        if folder:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return CANNOT_RUN

    model = build_model(job, device)
    optimizer = make_optimizer(model.model, config.optim)
    metrics = StepMetrics(job, peak_tflops(config.cluster.peak_tflops, device, job.precision))
    terminal = Terminal(job, folder, corpus) if folder else None
    sinks = make_sinks(job, folder, terminal)

    signal_number = train(job, model, optimizer, corpus, metrics, sinks, device, stop)
    if not signal_number and config.train.sample_tokens:
        text = write_text(job, model, corpus, device)
        if folder and terminal:
            (folder / "sample.txt").write_text(text)
            terminal.sample(text)
    for sink in sinks:
        sink.finish()
    dist.destroy_process_group()
    return 128 + signal_number if signal_number else 0


def open_corpus(job: Job) -> Corpus:
    """The data, prepared by one rank of each node. DataError: they can't be read, or hold less than one batch."""
    data, vocab_size = job.config.data, job.config.model.vocab_size
    prepared = once_per_node(lambda: prepare_corpus(data, vocab_size))
    corpus = load_corpus(data, vocab_size, job.config.seed, prepared)
    if corpus.num_train_tokens is not None and corpus.num_train_tokens < job.batch.tokens:
        raise DataError(
            f"the data hold {corpus.num_train_tokens} training tokens, less than one batch of "
            f"batch.tokens={job.batch.tokens}; valid: more data, or batch.tokens <= {corpus.num_train_tokens}"
        )
    return corpus


def build_model(job: Job, device: torch.device) -> DistributedModel:
    """The model with its initial weights, laid out over the ranks."""
    with device:
        model = GPT(job.config.model)
    model.init_weights(job.config.seed)
    mesh = make_mesh(job.layout, device)
    return parallelize(model, mesh, precision=job.precision, compile=job.config.compile)


def make_sinks(job: Job, folder: Path | None, terminal: Terminal | None) -> list[Sink]:
    """Where this rank's metrics go: nowhere, but for rank 0."""
    if folder is None or terminal is None:
        return []
    sinks: list[Sink] = [MetricsFile(folder)]
    if job.config.logger.name == "wandb":
        sinks.append(WandbLogger(job.config.logger, folder, asdict(job.config)))
    return [*sinks, terminal]


def write_text(job: Job, model: DistributedModel, corpus: Corpus, device: torch.device) -> str:
    """What the model writes after an end token, as text; as token ids where the tokens stand for none."""
    end = corpus.tokenizer.end if corpus.tokenizer else corpus.vocab_size - 1
    tokens = sample(
        model.logits,
        start=end,
        end=end,
        length=job.config.train.sample_tokens,
        context=job.batch.seq_len,
        seed=job.config.seed,
        device=device,
    )
    return corpus.tokenizer.decode(tokens) if corpus.tokenizer else " ".join(map(str, tokens))
