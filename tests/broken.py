"""Runs train.py with one thing broken in rank 1: `python -m tests.broken PLACE train.py overrides...`."""

import os
import runpy
import signal
import sys
from collections.abc import Callable
from typing import Any

import parallelism.distributed_model
import training.loop

PLACES = {
    "data": (training.loop, "rank_batch"),
    "forward": (parallelism.distributed_model.DistributedModel, "step"),
    "evaluation": (parallelism.distributed_model.DistributedModel, "evaluate"),
    "killed": (parallelism.distributed_model.DistributedModel, "evaluate"),
}


def breaking(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, until its second call in rank 1."""
    calls = []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 2:
            if place == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(f"broken on purpose in {place}")
        return function(*args, **kwargs)

    return broken


if __name__ == "__main__":
    place, script = sys.argv[1:3]
    owner, name = PLACES[place]
    setattr(owner, name, breaking(place, getattr(owner, name)))
    sys.argv = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")
