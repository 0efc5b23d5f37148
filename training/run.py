"""One rank's run from start to end: meet the others, build what is needed, train, leave results behind."""

import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor

from data.corpus import Corpus, load_corpus, prepare_corpus
from data.errors import DataError
from memory.cuda_history import cuda_history
from memory.footprint import Footprint, Owners
from memory.offload_optimizer import HostOptimizer
from models.gpt import GPT
from parallelism.distributed_model import DistributedModel
from parallelism.mesh import make_mesh, once_per_node, start_process_group
from parallelism.nd import parallelize
from parallelism.stop import Stop
from training.batch_control import BatchControl
from training.console import Terminal
from training.errors import CANNOT_RUN
from training.folder import FolderError, claim_folder
from training.job import Job
from training.logger import WandbLogger
from training.loop import show_footprint, train
from training.metrics import MetricsFile, Sink, StepMetrics, peak_tflops
from training.optimizer import Optimizer, make_optimizer, state_of
from training.sample import sample

SAMPLE_SECONDS = 10.0  # the longest that a look at the model's text may take, where many ranks share few cores

log = logging.getLogger(__name__)


def run(stop: Stop, job: Job, chosen_folder: Path | None) -> int:
    """Runs the job in this rank and returns the run's exit code. Rank 0 alone writes to a folder and the terminal."""
    device = start_process_group(job.device, job.config.cluster.timeout_minutes)
    first = dist.get_rank() == 0
    logging.basicConfig(level=logging.INFO if first else logging.ERROR, format="%(message)s")
    for words in job.notices:
        log.warning(words)
    try:
        corpus = prepare_data(job)
        folder = decide_folder(chosen_folder, job)
        signal_number = train_and_show(job, corpus, device, folder if first else None, stop)
        code = 128 + signal_number if signal_number else 0
    except (DataError, FolderError) as error:
        if first:
            print(f"error: {error}", file=sys.stderr, flush=True)
        code = CANNOT_RUN
    dist.destroy_process_group()
    return code


def decide_folder(chosen: Path | None, job: Job) -> Path:
    """The run's folder, which rank 0 claims and all ranks hear of. FolderError, in all: it can't be had."""
    answer: list[Path | FolderError | None] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = claim_folder(chosen, OmegaConf.to_yaml(asdict(job.config)))
        except FolderError as error:
            answer[0] = error
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if isinstance(answer[0], FolderError):
        raise answer[0]
    assert answer[0] is not None
    return answer[0]


def train_and_show(job: Job, corpus: Corpus, device: torch.device, folder: Path | None, stop: Stop) -> int:
    """Trains and writes a sample of text; returns the number of the signal that ended training early, or 0."""
    model = build_model(job, device)
    optimizer = build_optimizer(job, model, device)
    control = BatchControl(job, folder)
    footprint = Footprint(device, owners(job, model, optimizer), job.config.train.footprint_steps if folder else 0)
    metrics = StepMetrics(job, peak_tflops(job.config.cluster.peak_tflops, device, job.precision))
    terminal = Terminal(job, folder, corpus) if folder else None
    sinks = make_sinks(job, folder, terminal)
    profiled = job.config.train.memory_profile and device.type == "cuda"
    try:
        with cuda_history(folder / "memory.pickle") if folder and profiled else nullcontext():
            signal_number = train(job, model, optimizer, corpus, control, footprint, metrics, sinks, device, stop)
        if not signal_number and job.config.train.sample_tokens:
            text = write_text(job, model, corpus, device, stop)
            (signal_number,) = model.largest(stop())
            if folder and terminal:
                (folder / "sample.txt").write_text(text, encoding="utf-8")
                terminal.sample(text)
    finally:
        if footprint.num_left:  # the run ended before it was shown
            footprint.close()
            show_footprint(job, footprint, sinks)
        for sink in sinks:
            sink.finish()
    return signal_number


def prepare_data(job: Job) -> Corpus:
    """The data, prepared by one rank of each node. DataError: they can't be read, or hold less than one batch."""
    data, vocab_size = job.config.data, job.config.model.vocab_size
    prepared = once_per_node(lambda: prepare_corpus(data, vocab_size), mistake=DataError)
    corpus = load_corpus(data, vocab_size, job.config.seed, prepared)
    largest, keys = max(shape.tokens for shape in job.shapes.values()), job.config.batch
    key = "batch.stages.N.tokens" if keys.stages else "batch.double_to" if keys.double_to else "batch.tokens"
    if corpus.num_train_tokens is not None and corpus.num_train_tokens < largest:
        raise DataError(
            f"the data hold {corpus.num_train_tokens} training tokens, less than one batch of {key}={largest}; "
            f"valid: more data, or {key} <= {corpus.num_train_tokens}"
            + (", or batch.scale=1e-7" if keys.stages else "")
        )
    return corpus


def build_model(job: Job, device: torch.device) -> DistributedModel:
    """The model with its initial weights, laid out over the ranks."""
    with torch.device("meta"):
        model = GPT(job.config.model)
    return parallelize(
        model,
        make_mesh(job.layout, device, job.config.cluster.timeout_minutes),
        device,
        job.config.parallel,
        seed=job.config.seed,
        precision=job.precision,
        compile=job.config.compile,
        ckpt=job.config.memory.ckpt,
        offload=job.config.memory.offload,
    )


def build_optimizer(job: Job, model: DistributedModel, device: torch.device) -> Optimizer:
    """AdamW of this rank's parameters, where memory.offload wants it."""
    offload = job.config.memory.offload
    make = partial(make_optimizer, config=job.config.optim)
    if "optimizer" in offload and "params" not in offload:  # parameters that lie on the host are updated there anyway
        return HostOptimizer(model.parameters(), device, make)
    return make(model.parameters())


def owners(job: Job, model: DistributedModel, optimizer: Optimizer) -> Owners:
    """Whose tensors are of which kind of memory."""
    kinds: dict[str, Callable[[], list[Tensor]]] = {
        "parameters": lambda: list(model.parameters()),
        "gradients": lambda: [p.grad for p in model.parameters() if p.grad is not None],
        "optimizer": lambda: state_of(optimizer),
        "host": lambda: optimizer.host_tensors if isinstance(optimizer, HostOptimizer) else [],
    }
    if "params" in job.config.memory.offload:
        return {"host": lambda: [tensor for tensors in kinds.values() for tensor in tensors()]}
    return kinds


def make_sinks(job: Job, folder: Path | None, terminal: Terminal | None) -> list[Sink]:
    """Where this rank's metrics go: nowhere, but for rank 0."""
    if folder is None or terminal is None:
        return []
    sinks: list[Sink] = [MetricsFile(folder)]
    if job.config.logger.name == "wandb":
        sinks.append(WandbLogger(job.config.logger, folder, asdict(job.config)))
    return [*sinks, terminal]


def write_text(job: Job, model: DistributedModel, corpus: Corpus, device: torch.device, stop: Stop) -> str:
    """What the model writes after an end token, as text; as token ids where the tokens stand for none."""
    end = corpus.tokenizer.end if corpus.tokenizer else corpus.vocab_size - 1

    began = time.monotonic()

    def agree(token: int) -> int | None:
        enough = time.monotonic() - began > SAMPLE_SECONDS
        end_here, token = model.largest(int(enough or stop() > 0), token)
        return None if end_here else token

    tokens = sample(
        model.next_logits,
        start=end,
        end=end,
        num_entries=corpus.vocab_size,
        length=job.config.train.sample_tokens,
        context=max(shape.seq_len for shape in job.shapes.values()),
        seed=job.config.seed,
        device=device,
        agree=agree,
    )
    return corpus.tokenizer.decode(tokens) if corpus.tokenizer else " ".join(map(str, tokens))
