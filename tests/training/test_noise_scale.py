"""The estimator, where the answer is known; and what follows from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.noise_scale import DECAY, LEAST, Growth, NoiseScale, estimate


def gradients(generator: np.random.Generator, offset: np.ndarray, sigma: float, num: int) -> np.ndarray:
    """Gradients (num, d) of (y - w.x)^2 / 2 at w, for y = w*.x + sigma e with x and e normal; offset is w - w*."""
    x = generator.normal(size=(num, len(offset)))
    return (x @ offset - sigma * generator.normal(size=num))[:, None] * x


def linear_model(offset: np.ndarray, sigma: float) -> tuple[float, float]:
    """Its |G|^2 and tr(Sigma): E g = offset, and the covariance is (|offset|^2 + sigma^2) I + offset offset^T."""
    square = float(offset @ offset)
    return square, len(offset) * (square + sigma**2) + square


def measure(found: np.ndarray, counts: list[int]) -> tuple[float, float]:
    """The estimates from a step whose samples are found (num, d), cut into parts of so many."""
    cuts = np.cumsum(counts)[:-1]
    parts = [part.sum(0) / sum(counts) for part in np.split(found, cuts)]
    whole = found.mean(0)
    return estimate(float(whole @ whole), [float(part @ part) for part in parts], counts)


@pytest.mark.parametrize("counts", [[32, 32], [24, 40], [16, 16, 16, 16]], ids=str)
def test_both_estimates_are_unbiased(counts: list[int]) -> None:
    """Over 6,000 steps: the mean is within five standard errors, and these are small."""
    generator, offset = np.random.default_rng(1), np.full(10, 0.2)
    found = np.array([measure(gradients(generator, offset, 0.5, sum(counts)), counts) for _ in range(6000)])
    for values, true in zip(found.T, linear_model(offset, 0.5)):
        error = values.std() / np.sqrt(len(values))
        assert error < 0.02 * true
        assert abs(values.mean() - true) < 5 * error


def test_the_noise_scale_of_a_linear_model() -> None:
    """32 seeds, 400 steps each of batches that change: a 95% interval within 5% either side, that holds the truth."""
    offset, sigma = np.full(20, 0.3), 1.0
    square, trace = linear_model(offset, sigma)
    found = []
    for seed in range(32):
        generator, noise = np.random.default_rng(seed), NoiseScale()
        for step in range(400):
            half = (64, 128, 256)[step % 3]
            noise.add(*measure(gradients(generator, offset, sigma, 2 * half), [half, half]))
        assert noise.scale is not None
        found.append(noise.scale)
    width = 1.96 * np.std(found, ddof=1) / np.sqrt(len(found))
    assert width < 0.05 * trace / square
    assert abs(np.mean(found) - trace / square) < width


def test_there_is_no_estimate_before_it_means_something() -> None:
    noise = NoiseScale()
    for count in range(LEAST + 1):
        assert (noise.scale is None) == (count < LEAST)
        noise.add(square=1.0 + 0.1 * (count % 2), trace=50.0)
    weights = [DECAY**age for age in range(LEAST + 1)]  # of the last one first, whose square is 1.1
    squares = [weight * (1.1 if age % 2 == 0 else 1.0) for age, weight in enumerate(weights)]
    assert noise.scale == pytest.approx(50 * sum(weights) / sum(squares))

    lost = NoiseScale()  # |G|^2 is as often below 0 as above
    for count in range(100):
        lost.add(square=-1.0 if count % 2 else 1.0, trace=50.0)
        assert lost.scale is None

    still = NoiseScale()  # no noise: its estimate may be below 0
    for _ in range(10):
        still.add(square=1.0, trace=-1e-9)
    assert still.scale is None


def test_averages_are_taken_before_the_quotient_and_forget() -> None:
    noise = NoiseScale()
    for square, trace in [(1.0, 1.0), (3.0, 9.0)] * 200:
        noise.add(square, trace)
    assert noise.scale == pytest.approx((9 + DECAY) / (3 + DECAY))  # and not the mean of 1 and 3
    for _ in range(300):
        noise.add(1.0, 10.0)
    assert noise.scale == pytest.approx(10)


def test_noise_alone_is_seldom_taken_for_a_gradient() -> None:
    """|G|^2 = 0: a normal estimate passes three standard errors of five measurements in 2% of runs (Student's t, 4)."""
    generator, false_alarms = np.random.default_rng(0), 0
    for _ in range(1000):
        noise = NoiseScale()
        for square in generator.normal(size=LEAST):
            noise.add(square=square, trace=1.0)
        false_alarms += noise.scale is not None
    assert 5 < false_alarms < 40


def test_the_batch_doubles_after_some_measurements_in_a_row() -> None:
    growth = Growth(double_below=0.5, double_after=3, double_to=400)
    scales = [
        900.0,
        900.0,
        None,
        900.0,
        200.0,
        201.0,
        201.0,
        201.0,
        201.0,
    ]  # one is not there
    assert [growth.wants(100, scale) for scale in scales] == [*[False] * 7, True, True]
    growth.num_below = 0
    assert [growth.wants(200, 1000.0) for _ in range(3)] == [False, False, True]
    assert not growth.wants(201, 1000.0)  # twice that is beyond the limit


@given(st.integers(1, 1000), st.lists(st.floats(1, 1e6), max_size=50))
def test_the_batch_never_passes_its_limit(double_to: int, scales: list[float]) -> None:
    growth, tokens = Growth(double_below=1.0, double_after=1, double_to=double_to), 1
    for scale in scales:
        tokens *= 2 if growth.wants(tokens, scale) else 1
        assert tokens <= double_to
        assert tokens < 2 * max(scales)
