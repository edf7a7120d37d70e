"""Batches on their way to the device: while one micro-batch is computed with, the next one is copied.

Copies go from pinned memory, without waiting, on a stream of their own; the computation waits for a copy on the device
only. There are two buffers: the copy of a micro-batch begins when the last but one has been computed with, and what has
been pinned is kept until its copy is finished. The
copy of a step's first micro-batch begins in the step before, so there is something to overlap with one pass per step,
too. On the CPU there is nothing to copy, and everything passes through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.data.loading.loader import MicroBatch
from unisono.engines.nested import each
from unisono.engines.torch.numerics import precision
from unisono.task import Batch

Part = Callable[[str], AbstractContextManager[Any]]
_SYNCHRONOUS = ("cpu", "mps")  # one memory for both


class Streams(Protocol):
    """What an accelerator can do while it computes; tests have one with a clock of its own."""

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned memory of the host."""
        ...

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin to copy tensors to the device while it computes; returns the copies and an event at their end."""
        ...

    def use(self, tensors: list[Tensor], copied: Any) -> None:
        """Let what is computed from now on wait for the copies, and their memory stay until it is computed."""
        ...

    def finished(self, copied: Any) -> bool:
        """Whether the copies are finished."""
        ...

    def mark(self) -> Any:
        """An event at the end of everything that was queued until now."""
        ...

    def wait(self, computed: Any) -> None:
        """Let this process wait for that event."""
        ...


class DeviceStreams:
    """`Streams` of an accelerator, of any kind that `torch.accelerator` knows."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:  # noqa: D102 - see `Streams`
        return tensor if tensor.is_pinned() or tensor.layout != torch.strided else tensor.pin_memory()

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], torch.Event]:  # noqa: D102
        with self._side:  # the memory is of this stream, which never computes
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return copies, self._side.record_event()

    def use(self, tensors: list[Tensor], copied: torch.Event) -> None:  # noqa: D102
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(stream)  # else the next copy could be made into it while it is still read

    def finished(self, copied: torch.Event) -> bool:  # noqa: D102
        return copied.query()

    def mark(self) -> torch.Event:  # noqa: D102
        return torch.accelerator.current_stream(self._device).record_event()

    def wait(self, computed: torch.Event) -> None:  # noqa: D102
        computed.synchronize()


@dataclass(frozen=True)
class _Copy:
    """A micro-batch whose copy has begun."""

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
        self, device: torch.device, precision: str, part: Part = nullcontext, streams: Streams | None = None
    ) -> None:
        self.device, self._precision, self._part = device, precision, part
        self._streams = streams or (None if device.type in _SYNCHRONOUS else DeviceStreams(device))
        self._begun: dict[int, _Copy] = {}  # not used yet: at most one of training and one of evaluation
        self._used: deque[_Copy] = deque()
        self._steps: _Peekable | None = None

    def to_device(self, arrays: Batch) -> Batch:
        """Arrays on the device, at any depth of dicts, lists and tuples; other values pass as they are."""
        moved: Batch = each(partial(precision.to_device, device=self.device, precision=self._precision), arrays)
        return moved

    def prefetch(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Batch]]:
        """Each micro-batch with its arrays on the device; its copy begins when the device has the work of the last."""
        before = None
        for micro in batches:
            with self._part("transfer"):
                self._begin(micro)
                batch = self._take(micro)
            yield micro, batch
            if self._streams is not None:  # the device still has the work of this one, so the wait costs it nothing
                if before is not None:
                    self._streams.wait(before)
                before = self._streams.mark()

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same steps, the first micro-batch of the next of which `look_ahead` can begin to copy."""
        if self._streams is None:
            return steps
        self._steps = _Peekable(steps)
        return self._steps

    def look_ahead(self) -> None:
        """Begin to copy what the next step begins with: to be called when the device has all its work of this step."""
        if self._steps is not None and (batches := self._steps.peek()):
            with self._part("transfer"):
                self._begin(batches[0])

    def _begin(self, micro: MicroBatch) -> None:
        while self._used and self._finished(self._used[0]):
            self._used.popleft()
        if self._streams is None or id(micro) in self._begun:
            return
        host: list[Tensor] = []

        def pinned(value: Any) -> Any:
            tensor = precision.to_device(value, torch.device("cpu"), self._precision)
            if not isinstance(tensor, Tensor):
                return tensor
            assert self._streams is not None
            host.append(self._streams.pin(tensor) if tensor.device.type == "cpu" else tensor)
            return _Index(len(host) - 1)

        indices = each(pinned, micro.arrays)
        tensors, copied = self._streams.copy(host)
        batch = each(lambda value: tensors[value.number] if isinstance(value, _Index) else value, indices)
        self._begun[id(micro)] = _Copy(micro, host, batch, tensors, copied)

    def _take(self, micro: MicroBatch) -> Batch:
        if self._streams is None:
            return self.to_device(micro.arrays)
        copy = self._begun.pop(id(micro))
        self._streams.use(copy.tensors, copy.copied)
        self._used.append(_Copy(micro, copy.pinned, {}, [], copy.copied))
        return copy.batch

    def _finished(self, copy: _Copy) -> bool:
        return self._streams is None or self._streams.finished(copy.copied)


@dataclass(frozen=True)
class _Index:
    """Of a tensor in the list of those that are copied."""

    number: int


class _Peekable:
    """An iterator that can be looked into; an error met in doing so is raised when its turn comes."""

    def __init__(self, steps: Iterator[list[MicroBatch]]) -> None:
        self._steps = steps
        self._seen: tuple[list[MicroBatch] | None, Exception | None] | None = None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        self.peek()
        assert self._seen is not None
        batches, error = self._seen
        self._seen = None
        if error is not None:
            raise error
        assert batches is not None
        return batches

    def peek(self) -> list[MicroBatch] | None:
        if self._seen is None:
            try:
                self._seen = next(self._steps), None
            except Exception as error:
                self._seen = None, error
        return self._seen[0]
