"""train.memory_profile: every allocation of CUDA's allocator with its stack, as a file for pytorch.org/memory_viz."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_ENTRIES = 200_000  # the last ones are kept; several KB each


@contextmanager
def cuda_history(path: Path) -> Iterator[None]:
    """Has CUDA's allocator record what happens inside, and writes the last of it, for pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES)
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
