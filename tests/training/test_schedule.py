from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.schedule import (
    SHAPES,
    BatchSchedule,
    LearningRate,
    Stage,
    batch_at,
    lengths_at,
    lr_at,
    make_schedule,
    steps_at,
    tokens_at,
    unscaled_lr,
)

COSINE = LearningRate("cosine", peak=1.0, final=0.1, warmup=100, decay=200, end=1100)
STAGES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.integers(1, 3)), min_size=1, max_size=5)

# Llama 3 405B: Llama team 2024, section 3.4.1. 2^22, 2^23 and 2^24 tokens a step.
LLAMA3 = make_schedule(
    [Stage(0, 2**22, 4096), Stage(252_000_000, 2**23, 8192), Stage(2_870_000_000_000, 2**24, 8192)],
)
LLAMA3_LR = LearningRate("cosine", 8e-5, 8e-7, 8000, 0, 1_200_000, unit="steps")


def schedule_of(rows: list[tuple[int, int, int]]) -> BatchSchedule:
    """Stages of (tokens since the threshold before, tokens of a step, length)."""
    stages, threshold = [], 0
    for number, (gap, tokens, seq_len) in enumerate(rows):
        threshold += gap if number else 0
        stages.append(Stage(threshold, tokens, seq_len))
    return make_schedule(stages)


def test_llama3_starts_its_stages_where_the_paper_says() -> None:
    assert LLAMA3.starts == (0, 255_852_544, 2_870_007_037_952)
    assert LLAMA3.first_steps == (0, 61, 61 + 342_101)
    steps = steps_at(15_600_000_000_000, LLAMA3)
    assert steps == 1_100_929 == 61 + 342_101 + 758_767
    assert tokens_at(steps, LLAMA3) - 15_600_000_000_000 == 4_890_624


@pytest.mark.parametrize(
    ("tokens", "batch", "seq_len"),
    [
        (0, 2**22, 4096),
        (255_852_543, 2**22, 4096),
        (255_852_544, 2**23, 8192),
        (2_870_007_037_951, 2**23, 8192),
        (2_870_007_037_952, 2**24, 8192),
        (50_000_000_000_000, 2**24, 8192),
    ],
)
def test_llama3_batch(tokens: int, batch: int, seq_len: int) -> None:
    stage = batch_at(tokens, LLAMA3)
    assert (stage.tokens, stage.seq_len) == (batch, seq_len)


def test_llama3_rate_follows_the_steps() -> None:
    assert tokens_at(8000, LLAMA3) == 66_853_011_456
    assert tokens_at(1_200_000, LLAMA3) == 17_262_140_456_960
    assert lr_at(0, LLAMA3_LR, LLAMA3) == 8e-5 / 8000
    assert lr_at(tokens_at(7999, LLAMA3), LLAMA3_LR, LLAMA3) == 8e-5  # of the step that ends the warm-up
    last = tokens_at(1_100_928, LLAMA3)
    assert lr_at(last, LLAMA3_LR, LLAMA3) == pytest.approx(2.142e-6, rel=5e-4 / 2.1)
    in_tokens = replace(LLAMA3_LR, unit="tokens", warmup=66_853_011_456, end=17_262_140_456_960)
    assert lr_at(last, in_tokens, LLAMA3) == pytest.approx(2.612e-6, rel=5e-4 / 2.1)


@given(STAGES)
def test_no_step_straddles_a_stage_and_closed_forms_count_what_a_loop_counts(rows: list[tuple[int, int, int]]) -> None:
    batch = schedule_of(rows)
    tokens = step = index = 0
    while step < 150:
        # A stage starts at the first step at or after its threshold, but none is passed over.
        following = batch.stages[index + 1] if index + 1 < len(batch.stages) else None
        if following and tokens >= following.from_tokens and tokens > batch.starts[index]:
            index += 1
            assert batch.starts[index] == tokens
            assert batch.first_steps[index] == step
        assert batch_at(tokens, batch) is batch.stages[index]
        assert tokens_at(step, batch) == tokens
        assert steps_at(tokens, batch) == step
        assert steps_at(tokens + 1, batch) == step + 1
        tokens += batch.stages[index].tokens
        step += 1


@given(STAGES, st.integers(0, 400))
def test_lengths_change_where_the_schedule_says(rows: list[tuple[int, int, int]], tokens: int) -> None:
    batch = schedule_of(rows)
    seq_lens = [batch_at(each, batch).seq_len for each in range(tokens + 1)]
    changes = [each for each in range(1, tokens + 1) if seq_lens[each] != seq_lens[each - 1]]
    assert lengths_at(tokens, batch) == [(each, seq_lens[each]) for each in (0, *changes)]


@pytest.mark.parametrize("scaling", ["sqrt", "linear", "none"])
def test_the_rate_jumps_by_the_rule_at_each_stage(scaling: str) -> None:
    batch = make_schedule([Stage(0, 8, 4), Stage(40, 32, 8), Stage(400, 16, 8, lr_factor=0.5)])
    lr = replace(COSINE, batch_scaling=scaling, batch_ref=8)
    for tokens, ratio, factor in ((32, 1, 1), (40, 4, 1), (392, 4, 1), (424, 2, 0.5)):
        expected = {"sqrt": sqrt(ratio), "linear": ratio, "none": 1}[scaling] * factor
        assert lr_at(tokens, lr, batch) / unscaled_lr(tokens + 8 * ratio, lr) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_and_reaches_the_peak(shape: str) -> None:
    schedule = replace(COSINE, shape=shape)
    assert unscaled_lr(1, schedule) == pytest.approx(0.01)
    assert unscaled_lr(50, schedule) == pytest.approx(0.5)
    assert unscaled_lr(100, schedule) == 1.0


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        ("cosine", 600, 0.55),  # half way: the mean of peak and final
        ("cosine", 350, 0.1 + 0.9 * 0.8535533905932737),  # a quarter: (1 + cos 45 degrees) / 2
        ("linear", 350, 0.775),
        ("constant", 1100, 1.0),
        ("wsd", 900, 1.0),  # the fall takes the last 200 tokens
        ("wsd", 1000, 0.55),
    ],
)
def test_shapes_at_points_worked_out_by_hand(shape: str, tokens: int, expected: float) -> None:
    assert unscaled_lr(tokens, replace(COSINE, shape=shape)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_ends_on_final_and_stays(shape: str) -> None:
    schedule = replace(COSINE, shape=shape)
    assert unscaled_lr(1100, schedule) == pytest.approx(0.1)
    assert unscaled_lr(5000, schedule) == pytest.approx(0.1)


def test_without_warm_up_the_first_step_is_not_lost() -> None:
    assert unscaled_lr(1, replace(COSINE, warmup=0)) == pytest.approx(1.0, rel=1e-5)


def test_a_step_has_the_rate_of_its_end() -> None:
    batch = make_schedule([Stage(0, 20, 4)])
    assert [lr_at(tokens, COSINE, batch) for tokens in (0, 20, 80)] == pytest.approx([0.2, 0.4, 1.0])
    assert lr_at(1080, COSINE, batch) == pytest.approx(0.1)
