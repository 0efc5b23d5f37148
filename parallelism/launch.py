"""Starts the ranks of a run on this node through torch.distributed's elastic launcher, or joins those that are there.

Ranks are forked: they share the pages of torch that this process has imported, and eight of them start in seconds
where spawning takes a minute. So this process must run no tensor operation and touch no GPU before.
"""

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from parallelism.ranks import joined
from parallelism.stop import Stop

Work = Callable[..., int]  # what a rank does: takes a Stop, then the arguments; its result is the run's exit code

# By number: looking a name up takes a lock in the C library, and a rank forked while one of the launcher's threads
# holds it would wait for it for ever.
HERE = "127.0.0.1"
FAILED = 1  # exit code of a run in which a rank failed


def run_ranks(work: Work, *args: Any, num_ranks: int) -> int:
    """Runs `work(stop, *args)` in every rank and returns the run's exit code.

    Under torchrun and srun the ranks are there already and this process is one of them; else `num_ranks` are forked.
    SIGINT and SIGTERM ask the ranks to finish their step, and give 130 and 143; a second one ends them at once.
    """
    return _join(work, *args) if joined() else _fork(work, *args, num_ranks=num_ranks)


def _fork(work: Work, *args: Any, num_ranks: int) -> int:
    quiet = ("elastic.multiprocessing.api", "pipelining.schedules", "pipelining.stage")
    for name in (*(f"torch.distributed.{name}" for name in quiet), "torch.multiprocessing.spawn"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log of a failure is told below, once
    # LaunchConfig asks whether there are GPUs: of the driver's library, or the ranks could not use CUDA after the fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="ndgpt",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{HERE}:0",
        local_addr=HERE,
        max_restarts=0,
        start_method="fork",
        signals_to_handle="SIGUSR2",  # not ours: the launcher would kill a rank whose step takes over 30 seconds
    )
    # The launcher's store looks up the name of whoever connects, under a lock of the C library: a rank forked in that
    # moment would wait for the lock for ever. So no rank connects before all are forked.
    all_forked = multiprocessing.get_context("fork").Barrier(num_ranks)
    received: list[int] = []
    previous = {number: signal.signal(number, _pass_on(received)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        codes = elastic_launch(config, _forked_rank)(os.getpid(), all_forked, num_ranks, work, *args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if received and failure.exitcode in (-signal.SIGINT, 128 + signal.SIGINT):
            return 128 + received[0]
        print(f"rank {rank} failed:\n{_reason(failure)}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        for number, handler in previous.items():  # once a signal has come, one more must not change how the run ends
            signal.signal(number, signal.SIG_IGN if received else handler)
    return 128 + received[0] if received else max(codes.values())


def _pass_on(received: list[int]) -> Callable[[int, FrameType | None], None]:
    """A handler that sends the first signal to every rank as SIGINT and kills the ranks at the second."""
    launcher = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        ranks = multiprocessing.active_children()
        if os.getpid() != launcher or not ranks:  # a rank that has not set its own handler, or no rank yet
            os._exit(128 + number)
        received.append(number)
        for rank in ranks:
            assert rank.pid is not None
            os.kill(rank.pid, signal.SIGINT if len(received) == 1 else signal.SIGKILL)
        if len(received) > 1:
            os._exit(128 + number)

    return handle


def _forked_rank(launcher: int, all_forked: Any, num_ranks: int, work: Work, *args: Any) -> int:
    os.setpgrp()  # a signal to the launcher's whole group, such as a Ctrl-C, is the launcher's to pass on
    # When another rank fails the launcher ends this one by SIGTERM: at once, even inside a collective that waits for
    # the one that failed. So a wish to stop reaches forked ranks as SIGINT alone, and the launcher counts to two.
    os.environ["MASTER_ADDR"] = HERE  # the launcher says localhost
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks this host's name up: see HERE
    stop = Stop(signal.SIGINT, impatient=False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _share_cores(num_ranks)
    all_forked.wait(timeout=300)
    try:
        code = work(stop, *args)
    except Exception:
        # The launcher reports the rank it sees exit first. That has to be the cause: one that was killed before all,
        # then the first that raised, and not those whose collective broke because of them.
        time.sleep(0.5 if _first_to_fail() else 10)
        raise
    # From here on this process only waits for the launcher, whose death sends SIGINT, and must not outlive it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != launcher:
        os._exit(code)
    return code


def _join(work: Work, *args: Any) -> int:
    """This process is a rank of torchrun or srun. A failure is told once, by the first rank that fails."""
    ranks = joined()
    assert ranks is not None
    os.environ.update(ranks.variables)
    stop = Stop(signal.SIGINT, signal.SIGTERM, impatient=True)
    _share_cores(ranks.local_world_size)
    try:
        return work(stop, *args)
    except Exception:
        if _first_to_fail():
            print(f"rank {ranks.rank} failed:\n{_with_advice(traceback.format_exc())}", file=sys.stderr, flush=True)
        return FAILED


def _first_to_fail() -> bool:
    """Whether no other rank has failed before this one; the ranks' common store keeps the count."""
    if not dist.is_initialized():
        return True
    try:
        return dist.distributed_c10d._get_default_store().add("ranks_failed", 1) == 1
    except RuntimeError:  # the store died with the rank that held it, so that one was first
        return False


def _share_cores(num_ranks: int) -> None:
    """Divides this node's cores among its ranks: more threads than cores would only wait for each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // num_ranks))


def _reason(failure: ProcessFailure) -> str:
    """The traceback of a rank that raised, or how a rank ended that could not."""
    message: Any = failure.message  # torch calls it a str, but it is what the rank's error file holds
    return _with_advice(str(message["extraInfo"]["py_callstack"] if isinstance(message, dict) else message))


def _with_advice(report: str) -> str:
    """A traceback; where it is a collective's that gave up, with the key that says when, and whom to look at."""
    waited = "Timed out waiting" in report  # gloo's words
    advice = "\nIt waited for another rank, which hangs or needs longer than cluster.timeout_minutes."
    return report.rstrip() + (advice if waited else "")
