"""The figures that the README promises, measured: `make bench`. Run them on a machine that does nothing else."""

import pytest

from benchmarks import layouts, learning, overhead, pipeline, start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_start_within_15_seconds(num_ranks: int) -> None:
    assert start.seconds_to_first_step(num_ranks) < 15


def test_the_default_run_learns_within_four_minutes() -> None:
    unigram, _ = learning.counting_models()
    loss, seconds = learning.run()
    assert loss < 0.85 * unigram
    assert seconds < 240


def test_the_longer_run_beats_a_bigram_model() -> None:
    _, bigram = learning.counting_models()
    loss, _ = learning.run("experiment=longer_run")
    assert loss < bigram


def test_the_trainer_costs_at_most_three_percent() -> None:
    for name in ("default model", "GPT-2 124M, 2 x 256, fp32"):
        trainer, bare = overhead.medians(*overhead.CASES[name])
        assert bare / trainer >= 0.97, name


def test_the_trainer_holds_at_most_five_percent_more() -> None:
    trainer, bare = overhead.peaks()
    assert trainer / bare <= 1.05


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("dp=2", 1.0),
        ("parallel=fsdp dp=2", 0.85),
        ("parallel=tp", 0.75),
        ("parallel=tp parallel.sequence_parallel=true", 0.70),
        ("parallel=pp", 0.75),
        ("parallel=pp, interleaved", 0.80),
        ("parallel=cp", 0.90),
        ("parallel=cp parallel.cp_method=ulysses", 0.80),
        ("parallel=cp parallel.cp_method=allgather", 0.80),
    ],
)
def test_two_ranks_are_as_fast_as_two_threads_or_nearly(name: str, least: float) -> None:
    _, _, ratio = layouts.measure(name, num_pairs=11)
    assert ratio >= least


def test_every_schedule_has_the_bubble_of_theory_or_nearly() -> None:
    """Theory has no communication: a slot of 30 ms then waits for a message of about one."""
    for name, (measured, theory) in pipeline.measure(num_ranks=4, num_micro_batches=8).items():
        assert theory - 0.005 < measured < theory + 0.03, name
