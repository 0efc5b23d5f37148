"""Pictures of a schedule: batch, learning rate and noise scale against tokens; and what a larger batch would give."""

from collections.abc import Sequence
from pathlib import Path

from figures import new_figure, save_png
from training.schedule import BatchSchedule, LearningRate, batch_at, lr_at, steps_at, tokens_at

POINTS = 1000  # at which schedules are drawn, beside the starts of stages
COLOURS = {"batch": "#3b6ea5", "lr": "#c8553d", "noise": "#6a994e"}


def draw_schedule(
    batch: BatchSchedule,
    lr: LearningRate,
    total_tokens: int,
    measured: Sequence[tuple[int, float]],
    path: Path,
    title: str,
) -> None:
    """Draws the batch and, as measured after so many tokens, the noise scale; below them the learning rate."""
    figure = new_figure(10, 6)
    sizes, rates = figure.subplots(2, sharex=True)
    last_step = steps_at(total_tokens, batch) - 1
    steps = {last_step * point // POINTS for point in range(POINTS + 1)}
    for first in batch.first_steps[1:]:
        steps |= {first - 1, first}  # both sides of a jump
    tokens = [tokens_at(step, batch) for step in sorted(steps) if step <= last_step]
    sizes.step(tokens, [batch_at(each, batch).tokens for each in tokens], where="post", color=COLOURS["batch"])
    if measured:
        sizes.plot(*zip(*measured), ".", color=COLOURS["noise"])
    rates.plot(tokens, [lr_at(each, lr, batch) for each in tokens], color=COLOURS["lr"])
    sizes.set(title=title, ylabel="tokens", yscale="log")
    sizes.legend(["batch", "noise scale"][: 2 if measured else 1], frameon=False)
    rates.set(xlabel="tokens consumed", ylabel="learning rate", ylim=(0, None))
    save_png(figure, path)


def draw_speed(noise_scale: float, batch_sizes: Sequence[int], path: Path, title: str) -> None:
    """Draws 1 / (1 + B_noise / B), the progress of a step in parts of the most that any batch B can give.

    McCandlish et al. 2018, section 2.2. The batches of the run are marked.
    """
    figure = new_figure(10, 4.5)
    axes = figure.subplots()
    low, high = min(noise_scale / 50, *batch_sizes), max(noise_scale * 50, *batch_sizes)
    batches = [low * (high / low) ** (point / POINTS) for point in range(POINTS + 1)]
    axes.axvspan(low, noise_scale / 10, color=COLOURS["batch"], alpha=0.1, label="perfect scaling, within a tenth")
    axes.axvspan(noise_scale, high, color=COLOURS["lr"], alpha=0.1, label="diminishing returns")
    axes.plot(batches, [min(batch / noise_scale, 1) for batch in batches], "--", color="grey", label="B / B_noise")
    axes.plot(batches, [speed(batch, noise_scale) for batch in batches], color="black", label="1 / (1 + B_noise / B)")
    for batch in batch_sizes:
        axes.plot(batch, speed(batch, noise_scale), "o", color=COLOURS["noise"])
        axes.annotate(f" {batch:,}", (batch, speed(batch, noise_scale)), va="top")
    axes.set(title=title, xlabel="batch, tokens", ylabel="progress of a step", xscale="log")
    axes.set(xlim=(low, high), ylim=(0, 1.05))
    axes.legend(loc="upper left", frameon=False)
    save_png(figure, path)


def speed(batch: float, noise_scale: float) -> float:
    """Progress of a step of so many tokens, in parts of what a step of endlessly many would make."""
    return 1 / (1 + noise_scale / batch)
