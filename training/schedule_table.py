"""A run's stages as a table, worked out without running any of it. Imports no torch."""

from training.batch import Budget
from training.schedule import LearningRate, lr_at, steps_at, tokens_at

HEADS = ("stage", "from token", "steps", "tokens a step", "seq_len", "sequences", "first lr", "last lr")


def schedule_table(budget: Budget, lr: LearningRate, double_to: int | None) -> str:
    """One line a stage that the run reaches, with the rates of its first and its last step; and what it adds up to."""
    batch, stages = budget.batch, budget.stages
    num_steps = budget.num_steps or steps_at(budget.total_tokens, batch)
    rows: list[tuple[str, ...]] = [HEADS]
    ends = [*batch.first_steps[1 : len(stages)], num_steps]
    for number, (stage, start, first, end) in enumerate(zip(stages, batch.starts, batch.first_steps, ends)):
        counts = (number, start, end - first, stage.tokens, stage.seq_len, stage.tokens // stage.seq_len)
        rates = (lr_at(start, lr, batch), lr_at(tokens_at(end - 1, batch), lr, batch))
        rows.append((*(f"{count:,}" for count in counts), *(f"{rate:.3e}" for rate in rates)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    if double_to is None:
        lines.append(f"{num_steps:,} steps, {budget.total_tokens:,} tokens")
    else:
        fewer = f"in fewer steps where the noise scale doubles the batch: to {double_to:,}"
        lines.append(f"{budget.total_tokens:,} tokens, {fewer}")
    return "\n".join(lines)
