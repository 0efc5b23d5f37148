"""Accumulation: a rank's share of the batch is cut into micro-batches, one forward pass each. Imports no torch."""

from dataclasses import dataclass

from checks import around, divisors

AUTO_TOKENS = 8192  # memory.micro_batch=auto: the most tokens of one forward pass, unless one sequence has more


@dataclass(frozen=True)
class BatchShape:
    """One optimizer step in numbers: all ranks together, one rank, one forward pass."""

    num_sequences: int  # over all data parallel ranks
    seq_len: int  # tokens per sequence
    num_parts: int  # data parallel ranks
    micro_batch: int  # sequences of one forward pass on one rank

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.num_sequences * self.seq_len

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of one rank in one step."""
        return self.num_sequences // (self.num_parts * self.micro_batch)

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens = {self.seq_len:,} tokens x {self.micro_batch} sequences "
            f"x {self.num_micro_batches} micro-batches x {self.num_parts} dp ranks"
        )


def split_batch(
    *,
    tokens: int,
    seq_len: int,
    micro_batch: int | str,
    num_parts: int,
    shard: int = 1,
    rounds: int = 1,
    section: str = "batch",
) -> BatchShape:
    """Cuts a step of `tokens` into sequences, ranks' shares and micro-batches.

    `micro_batch=auto` is the largest divisor of a rank's sequences with at most AUTO_TOKENS tokens; in a pipeline one
    that gives a multiple of `rounds` micro-batches, if any does, else 1. ValueError: the tokens do not divide; the
    message has the nearest that do, and fewer ranks, a multiple of `shard`, that could. `section` has the keys.
    """
    share = seq_len * (1 if isinstance(micro_batch, str) else micro_batch)  # the least tokens a rank can take
    if tokens < 1 or tokens % (share * num_parts):
        named = "" if isinstance(micro_batch, str) else f" * memory.micro_batch={micro_batch}"
        step = share * num_parts
        below = max(tokens, 0) // step * step
        per_rank, rest = divmod(tokens, seq_len * num_parts)
        sizes = divisors(per_rank) if named and per_rank and not rest else []
        smaller = f"memory.micro_batch={around(int(micro_batch), sizes)}, or " if sizes else ""
        fewer = [d for d in divisors(max(tokens, 1) // share) if d < num_parts and d % shard == 0]
        raise ValueError(
            f"{section}.tokens={tokens} does not divide by {section}.seq_len={seq_len}{named} * dp={num_parts} = {step}"
            f"; nearest valid: {smaller}{section}.tokens={around(tokens, (below, below + step))}"
            + (f", or dp={fewer[-1]}" if fewer and tokens % share == 0 and 0 < tokens < step else "")
        )
    num_sequences = tokens // seq_len
    if isinstance(micro_batch, str):
        per_rank = num_sequences // num_parts
        largest = max(1, min(per_rank, AUTO_TOKENS // seq_len))
        sizes = [n for n in range(largest, 0, -1) if per_rank % n == 0]
        micro_batch = next((n for n in sizes if per_rank // n % rounds == 0), sizes[0] if rounds == 1 else 1)
    return BatchShape(num_sequences, seq_len, num_parts, micro_batch)


def micro_batches_of_halves(
    num_sequences: int, micro_batch: int, multiple: int | None = None
) -> tuple[int, int] | None:
    """The largest sizes, up to `micro_batch`, that cut the two halves of a rank's sequences into micro-batches.

    With a `multiple`, which the number of all micro-batches then is of, both are one size. None: there are none.
    """
    first, second = -(-num_sequences // 2), num_sequences // 2
    if second == 0:
        return None
    if multiple is None:
        return largest_divisor(first, micro_batch), largest_divisor(second, micro_batch)
    sizes = range(min(micro_batch, second), 0, -1)
    alike = (n for n in sizes if first % n == second % n == 0 and num_sequences // n % multiple == 0)
    size = next(alike, None)
    return None if size is None else (size, size)


def largest_divisor(number: int, most: int) -> int:
    """The largest number up to `most` that divides it."""
    return next(n for n in range(min(most, number), 0, -1) if number % n == 0)
