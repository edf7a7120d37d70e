"""Out of memory: known by its error, and said in a sentence. The run ends with its exit code; nothing is tried again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.config.batch_split import Split
from unisono.engines import rules

_ON_CPU = re.compile(r"DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_ON_CPU.search(str(error)))


@contextmanager
def explained(where: str, split: Split) -> Iterator[None]:
    """The context in which an allocator's error becomes one that says what was computed, and what to do.

    Raises:
        MemoryExhaustedError: on this rank alone. The others wait for it, until they are ended or their deadline ends.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise rules.memory_error(where, split, reason) from error
