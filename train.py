"""Trains a GPT on any layout of ranks.

python train.py                                  one run of the default model on this machine
python train.py dp=4 device=cpu                  four ranks; the losses stay the same
python train.py parallel=fsdp dp=2 tp=2          sharded data parallel times tensor parallel
python train.py -m seed=0,1,2                    three runs, one after the other
torchrun --nproc-per-node 8 train.py model=gpt2  joins torchrun's ranks (under srun alike)
python train.py --help                           groups and keys
"""

import os
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from training.errors import explained
from training.folder import check_free
from training.job import make_job

# A thread of torch's that waits for another spins for 300,000 rounds before it sleeps, and one busy process beside
# this one makes training ten times slower. At a tenth of that nothing is lost, and little to a neighbour.
os.environ.setdefault("GOMP_SPINCOUNT", "30000")
# The profiler, which measures memory, would say when it starts and stops, and that it has not seen all memory come. The
# second also hides other warnings of torch's C++ side, not its errors.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Checks the configuration, starts or joins the ranks, ends with their exit code."""
    with explained():
        job = make_job(cfg)
        folder, key = chosen_folder()
        check_free(folder, key)

    # Importing torch takes seconds: only a run that can go ahead pays for it, and forked ranks share what is imported.
    from parallelism.launch import run_ranks
    from training.run import run

    code = run_ranks(run, job, folder, num_ranks=job.layout.world_size)
    if code:
        sys.exit(code)


def chosen_folder() -> tuple[Path | None, str]:
    """The folder that the command line chose, one for each job of a multirun, and the key that did."""
    config = HydraConfig.get()
    if config.mode == RunMode.RUN:
        return (Path(config.run.dir) if config.run.dir != "." else None), "hydra.run.dir"
    subdir = config.sweep.subdir if config.sweep.subdir != "." else str(config.job.num)
    return (Path(config.sweep.dir) / subdir if config.sweep.dir != "runs" else None), "hydra.sweep.dir"


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until ranks run, a Ctrl-C has nothing to finish or to explain
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to `explained` as they are
    with explained(hydra_alone=True):
        main()
