"""Which ranks and devices are here, read from the environment before torch is imported.

torchrun says it in RANK and WORLD_SIZE, srun in SLURM_*; otherwise no rank is there yet and `launch.py` starts them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ranks:
    """The ranks that somebody else started, and this one's place among them."""

    rank: int
    world_size: int
    local_world_size: int  # on this node
    started_by: str  # torchrun or srun
    variables: Mapping[str, str]  # what torch.distributed reads from the environment


def joined(env: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks that are there already, or None."""
    if "RANK" in env and "WORLD_SIZE" in env:
        started_by, variables = "torchrun", env
    # SLURM_STEP_ID exists only inside an srun step: the batch script itself has SLURM_PROCID as well, but is no rank.
    elif "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        started_by, variables = "srun", torchrun_variables(env)
    else:
        return None
    return Ranks(
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
        local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
        started_by=started_by,
        variables=variables,
    )


def torchrun_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, from what srun has (names as in srun's manual, "output environment variables").

    The port follows from the job's and the step's number, so that all ranks agree and two steps on a node do not meet.
    """
    node = int(env.get("SLURM_NODEID", "0"))
    port = 20_000 + (int(env["SLURM_JOB_ID"]) * 31 + int(env["SLURM_STEP_ID"])) % 20_000
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node]),
        "MASTER_ADDR": env.get("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"])),
        "MASTER_PORT": env.get("MASTER_PORT", str(port)),
    }


def _tasks_per_node(text: str) -> list[int]:
    """srun's "2(x3),1" is [2, 2, 2, 1]."""
    counts = []
    for count, _, repeats in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeats or 1)
    return counts


def _first_host(nodelist: str) -> str:
    """srun's "gpu[003-005,9]-ib,login" starts with gpu003-ib."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^\[,]*)", nodelist)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist} names no host")
    return "".join(part or "" for part in match.groups())


def num_gpus() -> int:
    """GPUs this process may use. Torch is asked, and so imported, only where a driver is present."""
    if not (any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()):
        return 0
    import torch  # counts through the driver's library: no CUDA context is made, so forking stays safe

    return torch.cuda.device_count()


def available_bytes() -> int | None:
    """Memory that new processes may take on this machine, where the operating system tells."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else None
