"""Transfers batches to the device: while one micro-batch is computed, the next one is copied.

Copies go from pinned memory, without waiting, on a stream of their own; the computation waits for a copy on the device
only. There are two buffers: the copy of a micro-batch begins when the last but one has been computed with, and what has
been pinned is kept until its copy is finished. The copy of a step's first micro-batch begins in the step before, so
there is something to overlap with one pass per step, too. On the CPU there is nothing to copy, and everything passes
through.
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

from unisono.data.loading.loader import MicroBatch
from unisono.engines.nested import leaves, map_leaves
from unisono.engines.peekable import Peekable
from unisono.engines.torch.numerics import precision
from unisono.task import Batch

ProfileRegion = Callable[[str], AbstractContextManager[Any]]
_HOST_MEMORY_DEVICES = ("cpu", "mps")  # one memory for both


class Streams:
    """Asynchronous copies on any accelerator that `torch.accelerator` supports; tests use one with a mock clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._copy_stream = device, torch.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned memory of the host."""
        return tensor if tensor.is_pinned() or tensor.layout != torch.strided else tensor.pin_memory()

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Start copying tensors to the device; returns the copies and an event at their end."""
        with self._copy_stream:  # the memory is of this stream, which never computes
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return copies, self._copy_stream.record_event()

    def use(self, tensors: list[Tensor], copied: Any) -> None:
        """Make later computation wait for the copies, and keep their memory until it is done."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(stream)  # else the next copy could be made into it while it is still read

    def finished(self, copied: Any) -> bool:
        """Whether the copies are finished."""
        return bool(copied.query())

    def mark(self) -> Any:
        """An event at the end of the work queued so far."""
        return torch.accelerator.current_stream(self._device).record_event()

    def wait(self, computed: Any) -> None:
        """Let this process wait for that event."""
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
    """Brings micro-batches to the device.

    Args:
        device: of this process.
        precision: of the run; under fp64 floating-point arrays become float64.
        part: the context of a part of the step, for a profile.
        streams: in place of the device's.
    """

    def __init__(
        self, device: torch.device, precision: str, part: ProfileRegion = nullcontext, streams: Streams | None = None
    ) -> None:
        self.device, self._precision, self._part = device, precision, part
        self._streams = streams or (None if device.type in _HOST_MEMORY_DEVICES else Streams(device))
        self._started_copies: dict[int, _Copy] = {}  # not used yet: at most one of training and one of evaluation
        self._used: deque[_Copy] = deque()
        self._steps: Peekable | None = None

    def to_device(self, arrays: Batch) -> Batch:
        """Arrays on the device, at any depth of dicts, lists and tuples; other values pass as they are."""
        moved: Batch = map_leaves(partial(precision.to_device, device=self.device, precision=self._precision), arrays)
        return moved

    def prefetch(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Batch]]:
        """Each micro-batch with its arrays on the device; its copy begins when the device has the work of the last."""
        before = None
        for micro in batches:
            with self._part("transfer"):
                self._start_copy(micro)
                batch = self._finish_copy(micro)
            yield micro, batch
            if self._streams is not None:  # the device still has the work of this one, so the wait costs it nothing
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
        while self._used and streams.finished(self._used[0].copied):
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
