from dataclasses import replace

import pytest

from training.schedule import SHAPES, LearningRate, lr_at

COSINE = LearningRate("cosine", peak=1.0, final=0.1, warmup_tokens=100, decay_tokens=200, total_tokens=1100)


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_and_reaches_the_peak(shape: str) -> None:
    schedule = replace(COSINE, shape=shape)
    assert lr_at(1, schedule) == pytest.approx(0.01)
    assert lr_at(50, schedule) == pytest.approx(0.5)
    assert lr_at(100, schedule) == 1.0


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
    assert lr_at(tokens, replace(COSINE, shape=shape)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_ends_on_final_and_stays(shape: str) -> None:
    schedule = replace(COSINE, shape=shape)
    assert lr_at(1100, schedule) == pytest.approx(0.1)
    assert lr_at(5000, schedule) == pytest.approx(0.1)


def test_without_warm_up_the_first_step_is_not_lost() -> None:
    assert lr_at(1, replace(COSINE, warmup_tokens=0)) == pytest.approx(1.0, rel=1e-5)


def test_exact_at_the_size_of_large_runs() -> None:
    # Llama 3 405B's cosine in tokens, over its own token counts: far beyond what fp32 could count.
    schedule = LearningRate("cosine", 8e-5, 8e-7, 66_853_011_456, 0, 17_262_140_456_960)
    assert lr_at(66_853_011_456, schedule) == 8e-5
    assert lr_at(15_600_004_890_624, schedule) == pytest.approx(2.612e-6, rel=1e-3)
