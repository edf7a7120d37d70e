"""Recognises out-of-memory errors and explains them. The run ends with its exit code; nothing is retried."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from unisono.config.batch_split import BatchSplit
from unisono.engines import rules

_CPU_OOM_PATTERN = re.compile(r"DefaultCPUAllocator|not enough memory|[Cc]annot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_CPU_OOM_PATTERN.search(str(error)))


@contextmanager
def translate_oom(where: str, split: BatchSplit) -> Iterator[None]:
    """A context that turns an allocator's error into one that says what was computed and what to do.

    Raises:
        MemoryExhaustedError: on this rank only. The others wait for it until they are stopped or time out.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise rules.out_of_memory_error(where, split, reason) from error
