"""A run's stages as a table, worked out without running any of it. Imports no torch."""

from training.batch import Budget
from training.schedule import LearningRate, lr_at, steps_at, tokens_at

HEADS = ("stage", "from token", "steps", "tokens a step", "seq_len", "sequences", "first lr", "last lr")


def schedule_table(budget: Budget, lr: LearningRate, max_tokens: int | None) -> str:
    """One line a stage that the run reaches, with the rates of its first and its last step; and what it adds up to."""
    batch, steps = budget.batch, steps_at(budget.total_tokens, budget.batch)
    rows: list[tuple[str, ...]] = [HEADS]
    stages = budget.reachable()
    ends = [*batch.first_steps[1 : len(stages)], steps]
    for number, (stage, start, first, end) in enumerate(zip(stages, batch.starts, batch.first_steps, ends)):
        counts = (number, start, end - first, stage.tokens, stage.seq_len, stage.tokens // stage.seq_len)
        rates = (lr_at(start, lr, batch), lr_at(tokens_at(end - 1, batch), lr, batch))
        rows.append((*(f"{count:,}" for count in counts), *(f"{rate:.3e}" for rate in rates)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    total = tokens_at(steps, batch)
    if max_tokens is None:
        lines.append(f"{steps:,} steps, {total:,} tokens; the last step has a learning rate of {rates[1]:.3e}")
    else:
        lines.append(
            f"{budget.total_tokens:,} tokens, in fewer steps where the noise scale doubles the batch: to {max_tokens:,}"
        )
    return "\n".join(lines)
