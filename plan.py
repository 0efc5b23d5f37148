"""Looks at a run without starting it; takes the same keys as train.py.

python plan.py schedule=true batch=llama3                            batch and learning rate, stage by stage
python plan.py timeline=true parallel=pp pp=4 batch.tokens=2048      draws what each rank of the pipeline does when
"""

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from training.errors import explained
from training.job import Job, make_job
from training.schedule_table import schedule_table

CHOSEN: list[str] = []  # views, which the command line has beside the keys of a run


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Checks the configuration as train.py does, for as many ranks as it asks for, and shows the view."""
    with explained():
        cfg.device = "cpu"  # whatever is here: any number of ranks can be looked at
        job = make_job(cfg, planning=True)
        if len(CHOSEN) != 1 or not CHOSEN[0].endswith("=true"):
            commands = [f"python plan.py {view}=true {' '.join(sys.argv[1:])}".strip() for view in VIEWS]
            raise ValueError(f"plan.py shows one view; valid: {', or '.join(commands)}")
        view = CHOSEN[0].removesuffix("=true")
        if view == "timeline" and job.layout.pp == 1:
            raise ValueError("timeline=true draws pipelines, and pp=1; valid: pp=2 or more")
    for words in job.notices:
        print(words)
    VIEWS[view](job)


def show_schedule(job: Job) -> None:
    """Prints the stages of the run and draws batch and learning rate over its tokens."""
    from training.schedule_picture import draw_schedule

    most = max(shape.tokens for shape in job.shapes.values())
    print(schedule_table(job.budget, job.lr, most if job.config.batch.double_to else None))
    draw_schedule(
        job.budget.batch, job.lr, job.budget.total_tokens, [], Path("schedule.png"), "batch and learning rate"
    )
    print("drawn in schedule.png")


def show_timeline(job: Job) -> None:
    """Prints what the schedule costs on paper and draws it, from the very orders that training runs."""
    from parallelism.schedules import SCHEDULES
    from parallelism.slots import in_flight
    from parallelism.timeline import bubble, draw, on_paper

    parallel, p, m = job.config.parallel, job.layout.pp, job.first_shape.num_micro_batches
    virtual = parallel.stages_per_rank
    orders = SCHEDULES[parallel.pp_schedule].orders(p, m, virtual)
    spans = on_paper(orders)
    share = bubble(spans)
    title = f"{parallel.pp_schedule}: {p} ranks, {m} micro-batches, {virtual} stages a rank; bubble {share:.1%}"
    draw(spans, Path("timeline.png"), title, unit="forwards of a stage, of equal stages")
    print(f"{title}, so {1 - share:.1%} use")
    unit = f", each of 1/{virtual} of a rank's layers" if virtual > 1 else ""
    print(f"forwards in flight on each rank{unit}:", *map(in_flight, orders))
    print("drawn in timeline.png")


VIEWS = {"schedule": show_schedule, "timeline": show_timeline}

if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come to `explained` as they are
    CHOSEN += [argument for argument in sys.argv[1:] if argument.partition("=")[0] in VIEWS]
    sys.argv = [argument for argument in sys.argv if argument not in CHOSEN]
    with explained(hydra_alone=True):
        main()
