"""Copies accelerator tensors asynchronously to pinned host memory, on a separate stream.

The device's next work waits for the copies, since an update would change the source; this process does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.engines import host_arrays


class PinnedCopies:
    """Memory for copies, reused by the next call."""

    def __init__(self) -> None:
        self._block: Tensor | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[torch.Event] = []

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Allocate the memory for copies of these tensors."""
        _, size = host_arrays.plan_layout(tensors)
        if self._block is None or size > self._block.numel():
            self._block = None  # free it first, or both would exist at once
            self._block = _allocate(size)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start copying tensors; copies may be read after `wait`, and those of an earlier call are overwritten."""
        streams = self._begin({tensor.device for tensor in tensors})
        self.prepare(tensors)
        assert self._block is not None
        places, _ = host_arrays.plan_layout(tensors)
        copies = []
        for tensor, place in zip(tensors, places, strict=True):
            data = tensor.detach()
            size = data.numel() * data.element_size()
            memory = self._block[place : place + size].view(data.dtype).view(data.shape)
            with streams[data.device]:
                memory.copy_(data, non_blocking=True)
                data.record_stream(streams[data.device])  # keeps the memory from being reused before it is read
            copies.append(memory)
        self._copied = []
        for device, stream in streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)
            self._copied.append(stream.record_event())
        return copies

    def wait(self) -> None:
        """Wait until all copies are done; callable from any thread."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

    def _begin(self, devices: set[torch.device]) -> dict[torch.device, torch.Stream]:
        """Streams that wait for each device's queued work."""
        for device in devices:
            stream = self._streams.setdefault(device, torch.Stream(device))
            stream.wait_stream(torch.accelerator.current_stream(device))
        return {device: self._streams[device] for device in devices}


def _allocate(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=size > 0)
