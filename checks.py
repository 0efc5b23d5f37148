"""What a setting may be, refused in one line for a person: the key, the value, what would be valid. No torch here."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from math import inf, isqrt
from pathlib import Path
from typing import Any


def one_of(key: str, value: str, valid: Iterable[str]) -> None:
    """ValueError unless the value is one of the valid words."""
    words = list(valid)
    if value not in words:
        raise ValueError(f"{key}={value} is not one of {', '.join(words)}{nearest(value, words)}")


def at_least(section: str, settings: Any, least: float, *names: str) -> None:
    """ValueError naming the first of these keys of a section that is below `least` or infinite; null passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not least <= value < inf:
            raise ValueError(f"{section}.{name}={value} must be at least {least}, and finite")


def at_most(section: str, settings: Any, most: float, *names: str) -> None:
    """ValueError naming the first of these keys of a section that is above `most`; null passes."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value > most:
            raise ValueError(f"{section}.{name}={value} must be at most {most}")


def number_or_auto(key: str, value: float | str, least: float = 0) -> None:
    """ValueError unless the value is the word auto or a number from `least` up."""
    if value != "auto" and (isinstance(value, str) or not value >= least):
        raise ValueError(f"{key}={value} must be auto or a number of at least {least}")


def make_writable(key: str, folder: Path, mistake: type[Exception]) -> None:
    """Makes the folder that the key names. A `mistake`, in one line: it can't be made or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise mistake(f"{key}={folder} can't be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise mistake(f"{key}={folder} can't be written to; valid: a folder of yours")


def nearest(word: str, valid: Iterable[str]) -> str:
    """The end of a message that suggests the nearest valid name; nothing where no name is near."""
    names = list(valid)
    last = word.rpartition(".")[2]
    close = get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    # The right name in the wrong section: `tokens` for train.tokens, `train.layers` for model.layers.
    close = close or [name for name in names if get_close_matches(last, [name.rpartition(".")[2]], cutoff=0.8)]
    return f"; did you mean {close[0]}?" if close else ""


def around(value: int, valid: Iterable[int]) -> str:
    """The nearest valid numbers on both sides of a value that is not: "2 or 4"; none is below 1."""
    numbers = {number for number in valid if number >= 1}
    below = max((number for number in numbers if number < value), default=None)
    above = min((number for number in numbers if number > value), default=None)
    return " or ".join(str(number) for number in (below, above) if number is not None)


def divisors(number: int) -> list[int]:
    """What divides the number, from 1 up."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
