"""A copy of the state as it is now, in memory of this host, so that training can go on while it is written.

It costs memory for one copy of what this process saves. To fill memory for the first time takes ten times as long as to
fill it again, so it is kept from save to save, asked for in huge pages where the system has them, and beside the first
steps where `prepare` is called. What torch has on an accelerator is copied beside its work
(`unisono.engines.torch.pinned_copies`); all else is there when `copy` returns.
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
from unisono.engines.state import Shard

if TYPE_CHECKING:
    from unisono.engines.torch.pinned_copies import PinnedCopies

_ALIGNED = 64  # bytes; of any dtype, and of the CPU's widest registers
_PAGE = 4096  # bytes


class Staging:
    """Memory for copies of shards, used again by the next save."""

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.uint8)
        self._pinned: PinnedCopies | None = None
        self._asking: threading.Thread | None = None

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Ask for the memory of their copies, beside what the caller goes on to do."""
        beside, plain = self._dealt(shards)
        _, size = _laid_out([shard.data for shard in plain])

        def ask() -> None:
            with suppress(RuntimeError, OSError, MemoryError):  # too little memory: `copy` asks again, and says so
                self._block = _touched(_memory(size))
                if beside:
                    self._device().prepare([shard.data for shard in beside])

        self._asking = threading.Thread(target=ask, name="memory for saves", daemon=True)
        self._asking.start()

    def prepared(self) -> None:
        """Return once what `prepare` asked for is there."""
        if self._asking is not None:
            self._asking.join()
            self._asking = None

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """The same shards with their content of now, in memory of this host. It may be read only after `wait`.

        The copies of a call before are overwritten.
        """
        self.prepared()
        beside, plain = self._dealt(shards)
        copies: dict[int, Any] = {}
        if beside:  # first: they are under way while the others are made
            made = self._device().copy([shard.data for shard in beside])
            copies |= {id(shard): copy for shard, copy in zip(beside, made, strict=True)}
        places, size = _laid_out([shard.data for shard in plain])
        if size > self._block.size:
            self._block = np.empty(0, dtype=np.uint8)  # first, or there would be both at once
            self._block = _memory(size)
        for shard, place in zip(plain, places, strict=True):
            kind = host_arrays.dtype(host_arrays.name_of(shard.data))
            memory = self._block[place : place + host_arrays.bytes_of(shard.data)].view(kind).reshape(shard.data.shape)
            memory[...] = host_arrays.to_numpy(shard.data)
            copies[id(shard)] = memory
        return [replace(shard, data=copies[id(shard)]) for shard in shards]

    def wait(self) -> None:
        """Return once all copies are made; in whatever thread."""
        if self._pinned is not None:
            self._pinned.wait()

    def _device(self) -> PinnedCopies:
        if self._pinned is None:
            from unisono.engines.torch.pinned_copies import PinnedCopies

            self._pinned = PinnedCopies()
        return self._pinned

    def _dealt(self, shards: Sequence[Shard]) -> tuple[list[Shard], list[Shard]]:
        """What can be copied beside a device's work, and all else."""
        beside = [host_arrays.copies_beside(shard.data) for shard in shards]
        return [s for s, b in zip(shards, beside, strict=True) if b], [
            s for s, b in zip(shards, beside, strict=True) if not b
        ]


def _laid_out(arrays: Sequence[Any]) -> tuple[list[int], int]:
    """Where the copy of each begins in the block, and how many bytes that needs."""
    places, size = [], 0
    for array in arrays:
        places.append(size)
        size += -(-host_arrays.bytes_of(array) // _ALIGNED) * _ALIGNED
    return places, size


def _memory(size: int) -> Array:
    """So many bytes."""
    if size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(size, dtype=np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _touched(block: Array) -> Array:
    """The same, every page of which is there."""
    block[::_PAGE] = 0
    return block
