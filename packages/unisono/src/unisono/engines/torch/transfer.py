"""Transfers batches to the device: while one micro-batch is computed, the next one is copied.

Copies are asynchronous, from pinned memory on a separate stream; only the device waits for them. There are two buffers:
the copy of a micro-batch begins when the device has finished the one before the previous one, and pinned memory is kept
until its copy is complete. The copy of a step's first micro-batch begins during the previous step, so that copies
overlap with computation even with one pass per step. On the CPU, nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.nested import leaves, map_leaves
from unisono.engines.peekable import Peekable
from unisono.engines.torch.numerics import precision
from unisono.task import Batch

ProfileRegion = Callable[[str], AbstractContextManager[Any]]
_HOST_MEMORY_DEVICES = ("cpu", "mps")  # the device shares the host's memory


class Streams:
    """Asynchronous copies on any accelerator that `torch.accelerator` supports; tests use one with a mock clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copy_stream = device, torch.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned host memory."""
        return tensor if tensor.is_pinned() or tensor.layout != torch.strided else tensor.pin_memory()

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copying tensors to the device; returns the copies and an event at their end."""
        with self._copy_stream:  # the copies are allocated on this stream, which never computes
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return copies, self._copy_stream.record_event()

    def use(self, tensors: list[Tensor], copied: Any) -> None:
        """Make later computation wait for the copies, and keep their memory until it is done."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(stream)  # keeps the memory from being reused while it is still read

    def is_finished(self, copied: Any) -> bool:
        """Whether the copies are finished."""
        return bool(copied.query())

    def mark(self) -> Any:
        """An event at the end of the work queued so far."""
        return torch.accelerator.current_stream(self._device).record_event()

    def wait(self, computed: Any) -> None:
        """Block this process until the event."""
        computed.synchronize()


@dataclass(frozen=True)
class _Copy:
    """A micro-batch being copied."""

    micro: MicroBatch
    pinned: list[Tensor]
    batch: Batch
    tensors: list[Tensor]
    copied: Any


class Transfer:
    """Transfers micro-batches to the device.

    Args:
        device: of this process.
        precision: of the run; under fp64, floating-point arrays become float64.
        part: context of a part of the step, for profiling.
        streams: replaces the device's streams, for tests.
    """

    def __init__(
        self, device: torch.device, precision: str, part: ProfileRegion = nullcontext, streams: Streams | None = None
    ) -> None:
        self.device, self._precision, self._part = device, precision, part
        self._streams = streams or (None if device.type in _HOST_MEMORY_DEVICES else Streams(device))
        self._started_copies: dict[int, _Copy] = {}  # not used yet: at most one for training and one for evaluation
        self._used: deque[_Copy] = deque()
        self._steps: Peekable | None = None

    def to_device(self, arrays: Batch) -> Batch:
        """Move arrays in nested dicts, lists and tuples to the device; other values are unchanged."""
        moved: Batch = map_leaves(partial(precision.to_device, device=self.device, precision=self._precision), arrays)
        return moved

    def prefetch(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Batch]]:
        """Each micro-batch with its arrays on the device; copying starts once the previous one's work is queued."""
        before = None
        for micro in batches:
            with self._part("transfer"):
                self._start_copy(micro)
                batch = self._finish_copy(micro)
            yield micro, batch
            if self._streams is not None:  # the device is still busy with this one, so waiting costs nothing
                if before is not None:
                    self._streams.wait(before)
                before = self._streams.mark()

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same steps; `look_ahead` can start copying the first micro-batch of the next one."""
        if self._streams is None:
            return steps
        self._steps = Peekable(steps)
        return self._steps

    def look_ahead(self) -> None:
        """Start copying the next step's first micro-batch; call it once all work of this step is queued."""
        if self._steps is not None and (batches := self._steps.peek()):
            with self._part("transfer"):
                self._start_copy(batches[0])

    def _start_copy(self, micro: MicroBatch) -> None:
        streams = self._streams
        if streams is None:
            return
        while self._used and streams.is_finished(self._used[0].copied):
            self._used.popleft()
        if id(micro) in self._started_copies:
            return
        host = map_leaves(
            partial(precision.to_device, device=torch.device("cpu"), precision=self._precision), micro.arrays
        )
        found = [leaf for _, leaf in leaves(host) if isinstance(leaf, Tensor)]
        pinned = [streams.pin(tensor) if tensor.device.type == "cpu" else tensor for tensor in found]
        tensors, copied = streams.copy(pinned)
        copies = iter(tensors)
        batch = map_leaves(lambda leaf: next(copies) if isinstance(leaf, Tensor) else leaf, host)
        self._started_copies[id(micro)] = _Copy(micro, pinned, batch, tensors, copied)

    def _finish_copy(self, micro: MicroBatch) -> Batch:
        if self._streams is None:
            return self.to_device(micro.arrays)
        copy = self._started_copies.pop(id(micro))
        self._streams.use(copy.tensors, copy.copied)
        self._used.append(_Copy(micro, copy.pinned, {}, [], copy.copied))
        return copy.batch
