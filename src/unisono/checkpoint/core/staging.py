"""A copy of the state as it is now, in memory of this host, so that training can go on while it is written.

It costs memory for one copy of what this process saves. To fill memory for the first time takes ten times as long as to
fill it again, so it is kept from save to save, asked for in huge pages where the system has them, and beside the first
steps where `prepare` is called. What lies on an accelerator is copied into pinned memory on a stream of its own; the
device's next work waits for these copies, and this process does not.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from unisono.engines.state import Shard

_SYNCHRONOUS = ("cpu", "mps")  # devices without copies beside the computation
_ALIGNED = 64  # bytes; of any dtype, and of the CPU's widest registers
_PAGE, _AT_ONCE = 4096, 64 << 20  # bytes; of so many torch touches the pages in one thread


class Staging:
    """Memory for copies of shards, used again by the next save."""

    def __init__(self) -> None:
        self._blocks: dict[bool, Tensor] = {}  # pinned or not -> bytes
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[torch.Event] = []
        self._asking: threading.Thread | None = None

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Ask for the memory of their copies, beside what the caller goes on to do."""
        _, sizes = _laid_out([shard.data for shard in shards])

        def ask() -> None:
            with suppress(RuntimeError, OSError):  # too little memory: `copy` asks again, and says so
                for pinned, size in sizes.items():
                    self._blocks[pinned] = _touched(_block(size, pinned))

        self._asking = threading.Thread(target=ask, name="memory for saves", daemon=True)
        self._asking.start()

    def prepared(self) -> None:
        """Return once what `prepare` asked for is there."""
        if self._asking is not None:
            self._asking.join()
            self._asking = None

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """The same shards with their content of now, on the CPU. It may be read only after `wait`.

        The copies of a call before are overwritten.
        """
        streams = self._begin({shard.data.device for shard in shards if _beside(shard.data)})
        copies = self._memory([shard.data for shard in shards])
        for shard, memory in zip(shards, copies, strict=True):
            data: Tensor = shard.data.detach()
            if not _beside(data):
                memory.copy_(data)
            else:
                with streams[data.device]:
                    memory.copy_(data, non_blocking=True)
                    data.record_stream(streams[data.device])  # or what was freed could be overwritten before it is read
        self._end(streams)
        return [replace(shard, data=memory) for shard, memory in zip(shards, copies, strict=True)]

    def wait(self) -> None:
        """Return once all copies are made; in whatever thread."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

    def _memory(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room for a copy of each, one behind the other in the block of its kind."""
        self.prepared()
        places, sizes = _laid_out(tensors)
        for pinned, size in sizes.items():
            if pinned not in self._blocks or size > self._blocks[pinned].numel():
                self._blocks.pop(pinned, None)  # first, or there would be both at once
                self._blocks[pinned] = _block(size, pinned)
        return [
            self._blocks[_beside(tensor)][place : place + tensor.numel() * tensor.element_size()]
            .view(tensor.dtype)
            .view(tensor.shape)
            for tensor, place in zip(tensors, places, strict=True)
        ]

    def _begin(self, devices: set[torch.device]) -> dict[torch.device, torch.Stream]:
        """Streams that wait for what each device has been given to do."""
        for device in devices:
            stream = self._streams.setdefault(device, torch.Stream(device))
            stream.wait_stream(torch.accelerator.current_stream(device))
        return {device: self._streams[device] for device in devices}

    def _end(self, streams: dict[torch.device, torch.Stream]) -> None:
        """Let each device's later work wait for the copies: the next update would change what is being copied."""
        self._copied = []
        for device, stream in streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)
            self._copied.append(stream.record_event())


def _beside(data: Tensor) -> bool:
    return data.device.type not in _SYNCHRONOUS


def _laid_out(tensors: Sequence[Tensor]) -> tuple[list[int], dict[bool, int]]:
    """Where the copy of each begins in the block of its kind, and how many bytes each block needs: pinned or not."""
    places, sizes = [], {False: 0, True: 0}
    for tensor in tensors:
        pinned = _beside(tensor)
        places.append(sizes[pinned])
        sizes[pinned] += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
    return places, sizes


def _block(size: int, pinned: bool) -> Tensor:
    """So many bytes."""
    if pinned or size == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned and size > 0)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _touched(block: Tensor) -> Tensor:
    """The same, every page of which is there."""
    for first in range(0, block.numel(), _AT_ONCE):
        block[first : first + _AT_ONCE : _PAGE].zero_()
    return block
