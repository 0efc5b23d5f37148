"""Trains a GPT on any layout of ranks.

python train.py                                  one run of the default model on this machine
python train.py dp=4 device=cpu                  four ranks; the losses stay the same
python train.py -m seed=0,1,2                    three runs, one after the other
torchrun --nproc-per-node 8 train.py model=gpt2  joins torchrun's ranks (under srun alike)
python train.py --help                           groups and keys
"""

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from parallelism.ranks import joined
from training.errors import explained
from training.folder import claim_folder
from training.job import make_job

# train.steps falls back to its default only where train.tokens is not given.
OmegaConf.register_new_resolver("unless", lambda other, default: default if other is None else None)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Checks the configuration, decides the run's folder, starts the ranks, ends with their exit code."""
    with explained():
        job = make_job(cfg)
        ranks = joined()
        folder = (
            claim_folder(chosen_folder(), OmegaConf.to_yaml(cfg, resolve=True)) if not ranks or not ranks.rank else None
        )

    # Importing torch takes seconds: only a run that can go ahead pays for it, and forked ranks share what is imported.
    from parallelism.launch import run_ranks
    from training.run import run

    code = run_ranks(run, job, folder, num_ranks=job.layout.world_size)
    if code:
        sys.exit(code)


def chosen_folder() -> Path | None:
    """What hydra.run.dir or hydra.sweep.dir was set to; a folder for each job of a multirun."""
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.RUN:
        return Path(hydra_config.run.dir) if hydra_config.run.dir != "." else None
    if hydra_config.sweep.dir == ".":
        return None
    subdir = hydra_config.sweep.subdir
    return Path(hydra_config.sweep.dir) / (subdir if subdir != "." else str(hydra_config.job.num))


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to `explained` as they are
    with explained():
        main()
