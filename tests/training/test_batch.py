"""What the keys of `batch` come to: scaling, budgets, and stages that can't run."""

from math import sqrt

import pytest
from hydra import compose, initialize_config_dir
from omegaconf.errors import OmegaConfBaseException

from tests.cli import ROOT, make_tiny_job
from training.batch import doublings
from training.errors import explain
from training.job import Job, make_job
from training.schedule import batch_at, lr_at, unscaled_lr
from training.schedule_table import schedule_table


def job_of(*overrides: str) -> Job:
    """The job of a command line on one CPU rank."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return make_job(compose("config", ["device=cpu", *overrides]), planning=True)


def ramp(*stages: str) -> list[str]:
    """Overrides for stages of "FROM TOKENS SEQ_LEN"."""
    rows = [dict(zip(("from_tokens", "tokens", "seq_len"), stage.split())) for stage in stages]
    listed = ",".join("{" + ",".join(f"{key}:{value}" for key, value in row.items()) + "}" for row in rows)
    return ["batch.tokens=null", "batch.seq_len=null", f"batch.stages=[{listed}]"]


def test_llama3_is_the_papers_schedule_with_its_own_budget() -> None:
    budget = job_of("batch=llama3").budget
    assert budget.batch.starts == (0, 255_852_544, 2_870_007_037_952)
    assert (budget.num_steps, budget.total_tokens) == (1_100_929, 15_600_004_890_624)
    assert [stage.seq_len for stage in budget.batch.stages] == [4096, 8192, 8192]


def test_the_405b_recipe_ends_within_its_cosine() -> None:
    job = job_of("experiment=llama3_405b")
    assert (job.lr.warmup, job.lr.end, job.lr.unit) == (8000, 1_200_000, "steps")
    last = lr_at(job.budget.total_tokens - 2**24, job.lr, job.budget.batch)
    assert last == pytest.approx(2.142e-6, rel=5e-4 / 2.142)
    table = schedule_table(job.budget, job.lr, None).splitlines()
    assert [line.split()[2] for line in table[1:4]] == ["61", "342,101", "758,767"]
    assert table[3].split()[-1] == "2.142e-06"
    assert table[4] == "1,100,929 steps, 15,600,004,890,624 tokens"


def test_llama3_mini_is_the_same_ten_million_times_smaller() -> None:
    job = job_of("experiment=llama3_mini")
    stages = job.budget.batch.stages
    # Thresholds of 25.2 and 287,000 tokens, at steps of sqrt(1e-7) * 2^22 = 1,326.4 tokens and so on.
    assert [(stage.tokens, stage.seq_len) for stage in stages] == [(21 * 64, 64), (21 * 128, 128), (41 * 128, 128)]
    assert job.budget.batch.first_steps == (0, 1, 1 + 107)
    assert job.budget.num_steps == 351
    assert 0 <= job.budget.total_tokens - 1_560_000 < stages[-1].tokens
    assert "4,194,304 tokens a step become 1,344 (1,326.4 before rounding)" in job.notices[0]
    for tokens in (0, 1344, 288_960, job.budget.total_tokens - 5248):
        stage = batch_at(tokens, job.budget.batch)
        shape = unscaled_lr(tokens + stage.tokens, job.lr)
        assert lr_at(tokens, job.lr, job.budget.batch) / shape == pytest.approx(sqrt(stage.tokens / 1344))


def test_scaling_rounds_to_what_the_layout_runs_and_writes_down_what_is_run() -> None:
    job = job_of("experiment=llama3_mini", "dp=4", "lr.warmup_tokens=1e11")
    assert [stage.tokens for stage in job.budget.batch.stages] == [20 * 64, 20 * 128, 40 * 128]
    again = job.config.batch
    assert (again.scale, [stage.from_tokens for stage in again.stages]) == (1, [0, 25, 287_000])
    assert (job.config.train.tokens, job.lr.warmup) == (1_560_000, 10_000)
    assert job_of("experiment=llama3_mini", "parallel=pp").first_shape.num_micro_batches % 2 == 0
    constant = job_of("batch.scale=0.25", "train.tokens=1e6")
    assert (constant.first_shape.tokens, constant.config.train.tokens) == (1024, 250_000)


def test_scaling_keeps_what_fits_and_the_number_of_doublings() -> None:
    exact = ["lr=wsd", "train.tokens=20010", "lr.warmup_tokens=10003", "lr.decay_tokens=10007", "batch.tokens=512"]
    lr = job_of(*exact, "batch.scale=0.5", "batch.seq_len=32").lr
    assert (lr.warmup, lr.decay, lr.end) == (5001, 5003, 10005)
    assert job_of("lr.warmup_tokens=0", "batch.scale=0.5", "train.tokens=1e6").lr.warmup == 0
    grown = job_of("batch=noise_scale", "batch.scale=0.3", "batch.seq_len=32", "batch.tokens=512")
    assert len(grown.shapes) == 1 + 5


def test_every_stage_keeps_a_step_however_small_the_scale() -> None:
    job = job_of("batch=llama3", "batch.scale=1e-14")
    assert job.budget.batch.first_steps == (0, 1, 2)
    assert job.budget.stages == job.budget.batch.stages[:1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (ramp("5 64 32"), "from_tokens of batch.stages are [5]; valid: 0 first, each above the one before"),
        (ramp("0 64 32", "9 64 32", "9 64 32"), "are [0, 9, 9]; valid: 0 first"),
        (ramp("0 64 32", "64 64 64"), "batch.stages.1.seq_len=64 is longer than model.context=32; valid:"),
        (ramp("0 64 32", "64 80 32"), "batch.stages.1.tokens=80 does not divide by batch.stages.1.seq_len=32 * dp=1"),
        (
            [*ramp("0 64 32", "64 96 32"), "dp=2"],
            "batch.stages.1.tokens=96 does not divide by batch.stages.1.seq_len=32",
        ),
        ([*ramp("0 64 32", "64 64 2"), "cp=2"], "batch.stages.1.seq_len=2 does not divide by 2 * cp = 4"),
        (
            [*ramp("0 64 32", "64 96 32"), "pp=2", "model.layers=4", "parallel.pp_schedule=interleaved_1f1b"],
            "cuts a rank's 3 sequences of batch.stages.1.tokens=96 into 3",
        ),
        (ramp("0 0 32"), "batch.stages.0.tokens=0 must be at least 1"),
        (["batch.stages=[{from_tokens:0,tokens:64}]"], "batch.stages.0.seq_len has no value; valid: a whole number"),
        (
            ["batch.stages=[{from_tokens:0,tokens:64,seqlen:2}]"],
            "no key batch.stages.N.seqlen; did you mean batch.stages.N.seq_len?",
        ),
        (
            ["batch.stages=[{from_tokens:0,tokens:64,seq_len:32}]"],
            "beside 1 batch.stages, which have their own; valid:",
        ),
        (
            ["batch.tokens=null"],
            "batch.tokens=None batch.seq_len=32, and batch.stages is empty; valid: both numbers, or",
        ),
        (["batch.stages=[{from_tokens:0,tokens:a,seq_len:2}]"], "batch.stages.N.tokens=a has the wrong type; valid: a"),
        (
            ["batch.stages=5"],
            "batch.stages has the wrong type; valid: a list of {from_tokens: 0, tokens: 2048",
        ),
        (["batch.double_to=1e18"], "batch.double_to=1000000000000000000 must be at most"),
        (["batch.scale=0"], "batch.scale=0.0 must be above 0, and at most 1000"),
        (["batch.double_to=256"], "batch.double_to=256 is how far batch=noise_scale doubles batch.tokens=512"),
        (["batch.double_to=1024"], "so that steps are not known before: train.steps=4"),
        (["lr.unit=step"], "lr.unit=step is not one of tokens, steps; did you mean steps?"),
        (["lr.batch_scaling=square"], "lr.batch_scaling=square is not one of sqrt, linear, none"),
        (
            ["lr.end_tokens=100", "lr.warmup_tokens=200"],
            "lr.end_tokens=100; valid: fewer, or lr.warmup_tokens=auto",
        ),
        (["noise.every=-1"], "noise.every=-1 must be at least 0"),
    ],
    ids=str,
)
def test_refused_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises((ValueError, OmegaConfBaseException)) as error:
        make_tiny_job(*overrides)
    assert message in explain(error.value)


def test_stages_that_the_run_does_not_reach_may_be_anything() -> None:
    make_tiny_job(*ramp("0 64 32", "200 80 32"), "train.steps=4")
    with pytest.raises(ValueError, match=r"batch\.stages\.1\.tokens=80"):
        make_tiny_job(*ramp("0 64 32", "200 80 32"), "train.steps=5")


def test_batches_that_have_no_halves_are_told() -> None:
    assert make_tiny_job("dp=8").notices == []
    (notice,) = make_tiny_job("dp=16").notices
    assert (
        "noise.every=10 measures nothing in steps of 512 tokens: of a rank's sequences, 1, there are no halves"
        in notice
    )
    assert make_tiny_job("dp=16", "noise.every=0").notices == []


def test_a_batch_whose_noise_cannot_be_measured_is_not_driven_by_it() -> None:
    with pytest.raises(ValueError, match=r"batch.double_to=16384 needs the noise scale, and .*; valid: batch.tokens=N"):
        job_of("batch=noise_scale", "dp=8")
    assert job_of("batch=noise_scale", "dp=8", "batch.tokens=2048").notices == []


def test_doublings() -> None:
    assert doublings(3, 24) == [6, 12, 24]
    assert doublings(3, 23) == [6, 12]
    job = job_of("batch=noise_scale", "batch.double_to=5000")
    assert sorted(shape.tokens for shape in job.shapes.values()) == [1024, 2048, 4096]
