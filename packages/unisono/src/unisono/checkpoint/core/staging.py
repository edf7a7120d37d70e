"""Copies the current state to host memory, so that training can continue while it is written.

This needs memory for one copy of what this process saves. Writing to fresh memory takes ten times as long as reusing
it, so it is kept between saves, uses huge pages if available, and is allocated during the first steps if `prepare` is
called. torch tensors on an accelerator are copied asynchronously (`unisono.engines.torch.state.pinned_copies`); all
other copies are complete when `copy` returns.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.engines import host_arrays
from unisono.engines.host_arrays import Array
from unisono.engines.state import ArrayShard

if TYPE_CHECKING:
    from unisono.engines.torch.state.pinned_copies import PinnedCopies

_PAGE = 4096  # bytes


class Staging:
    """Memory for copies of shards, reused by the next save."""

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.uint8)
        self._pinned: PinnedCopies | None = None
        self._allocation: threading.Thread | None = None

    def prepare(self, shards: Sequence[ArrayShard]) -> None:
        """Allocate the memory for copies of these shards in the background."""
        beside, plain = self._split_by_device(shards)
        _, size = host_arrays.plan_layout([shard.data for shard in plain])

        def ask() -> None:
            with suppress(RuntimeError, OSError, MemoryError):  # `copy` tries again and reports it
                self._block = _allocate(size)
                self._block[::_PAGE] = 0  # the kernel provides a page when it is first touched
                if beside:
                    self._device().prepare([shard.data for shard in beside])

        self._allocation = threading.Thread(target=ask, name="memory for saves", daemon=True)
        self._allocation.start()

    def wait_until_prepared(self) -> None:
        """Wait for the allocation that `prepare` started."""
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def copy(self, shards: Sequence[ArrayShard]) -> list[ArrayShard]:
        """Copies of the shards in host memory, to be read only after `wait`.

        Overwrites the copies of the previous call.
        """
        self.wait_until_prepared()
        beside, plain = self._split_by_device(shards)
        copies: dict[int, Any] = {}
        if beside:  # started first, to overlap with the others
            made = self._device().copy([shard.data for shard in beside])
            copies |= {id(shard): copy for shard, copy in zip(beside, made, strict=True)}
        places, size = host_arrays.plan_layout([shard.data for shard in plain])
        if size > self._block.size:
            self._block = np.empty(0, dtype=np.uint8)  # free it first, or both would exist at once
            self._block = _allocate(size)
        for shard, place in zip(plain, places, strict=True):
            kind = host_arrays.parse_dtype(host_arrays.dtype_name(shard.data))
            memory = self._block[place : place + host_arrays.nbytes(shard.data)].view(kind).reshape(shard.data.shape)
            memory[...] = host_arrays.to_numpy(shard.data)
            copies[id(shard)] = memory
        return [replace(shard, data=copies[id(shard)]) for shard in shards]

    def wait(self) -> None:
        """Wait until all copies are done; callable from any thread."""
        if self._pinned is not None:
            self._pinned.wait()

    def _device(self) -> PinnedCopies:
        if self._pinned is None:
            from unisono.engines.torch.state.pinned_copies import PinnedCopies

            self._pinned = PinnedCopies()
        return self._pinned

    def _split_by_device(self, shards: Sequence[ArrayShard]) -> tuple[list[ArrayShard], list[ArrayShard]]:
        """The shards that can be copied asynchronously, and all others."""
        parts: tuple[list[ArrayShard], list[ArrayShard]] = ([], [])
        for shard in shards:
            parts[not host_arrays.can_copy_async(shard.data)].append(shard)
        return parts


def _allocate(size: int) -> Array:
    """Allocate an array of bytes, in huge pages if possible."""
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size, dtype=np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
