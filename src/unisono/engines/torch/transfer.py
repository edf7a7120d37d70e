"""Batches on their way to the device: while one micro-batch is computed with, the next one is copied.

Copies go from pinned memory, without waiting, on a stream of their own; the computation waits for a copy on the device
only. There are two buffers: the copy of a micro-batch begins when the last but one has been computed with, and what has
been pinned is kept until its copy is finished. The
copy of a step's first micro-batch begins in the step before, so there is something to overlap with one pass per step,
too. On the CPU there is nothing to copy, and everything passes through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.data.loading.loader import MicroBatch
from unisono.engines.peekable import Peekable
from unisono.engines.torch.numerics import precision
from unisono.task import Batch

Part = Callable[[str], AbstractContextManager[Any]]
_SYNCHRONOUS = ("cpu", "mps")  # one memory for both


class Streams(Protocol):
    """What an accelerator can do beside computing; tests have one with a clock of its own."""

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor in pinned memory of the host."""
        ...

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        """Begin to copy tensors to the device, beside what it computes; and what tells when that is finished."""
        ...

    def use(self, tensors: list[Tensor], copied: Any) -> None:
        """Let what is computed from now on wait for the copies, and their memory wait for it."""
        ...

    def finished(self, copied: Any) -> bool:
        """Whether the copies are made."""
        ...

    def mark(self) -> Any:
        """What tells when everything is computed that was asked for until now."""
        ...

    def wait(self, computed: Any) -> None:
        """Let this process wait for that."""
        ...


class DeviceStreams:
    """The streams of an accelerator, of any kind that `torch.accelerator` knows."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:
        """See `Streams`."""
        return tensor if tensor.is_pinned() or tensor.layout != torch.strided else tensor.pin_memory()

    def copy(self, tensors: list[Tensor]) -> tuple[list[Tensor], torch.Event]:
        """See `Streams`."""
        with self._side:  # the memory is of this stream, which never computes
            copies = [tensor.to(self._device, non_blocking=True) for tensor in tensors]
        return copies, self._side.record_event()

    def use(self, tensors: list[Tensor], copied: torch.Event) -> None:
        """See `Streams`."""
        stream = torch.accelerator.current_stream(self._device)
        stream.wait_event(copied)
        for tensor in tensors:
            tensor.record_stream(stream)  # else the next copy could be made into it while it is still read

    def finished(self, copied: torch.Event) -> bool:
        """See `Streams`."""
        return copied.query()

    def mark(self) -> torch.Event:
        """See `Streams`."""
        return torch.accelerator.current_stream(self._device).record_event()

    def wait(self, computed: torch.Event) -> None:
        """See `Streams`."""
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
        self._device, self._precision, self._part = device, precision, part
        self._streams = streams or (None if device.type in _SYNCHRONOUS else DeviceStreams(device))
        self._begun: dict[int, _Copy] = {}  # not used yet: at most one of training and one of evaluation
        self._used: deque[_Copy] = deque()
        self._coming: Peekable | None = None

    def now(self, arrays: Batch) -> Batch:
        """Arrays on the device, at any depth of dicts, lists and tuples; other values pass as they are."""
        moved: Batch = each(partial(precision.to_device, device=self._device, precision=self._precision), arrays)
        return moved

    def ahead(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Batch]]:
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
        self._coming = Peekable(steps)
        return self._coming

    def look_ahead(self) -> None:
        """Begin to copy what the next step begins with: to be called when the device has all its work of this step."""
        if self._coming is not None and (batches := self._coming.peek()):
            with self._part("transfer"):
                self._begin(batches[0])

    def forget(self) -> None:
        """Let go of what was begun to be copied, of steps that will not come."""
        self._begun.clear()
        self._used.clear()
        self._coming = None

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
            return _Place(len(host) - 1)

        places = each(pinned, micro.arrays)
        tensors, copied = self._streams.copy(host)
        batch = each(lambda value: tensors[value.number] if isinstance(value, _Place) else value, places)
        self._begun[id(micro)] = _Copy(micro, host, batch, tensors, copied)

    def _take(self, micro: MicroBatch) -> Batch:
        if self._streams is None:
            return self.now(micro.arrays)
        copy = self._begun.pop(id(micro))
        self._streams.use(copy.tensors, copy.copied)
        self._used.append(_Copy(micro, copy.pinned, {}, [], copy.copied))
        return copy.batch

    def _finished(self, copy: _Copy) -> bool:
        return self._streams is None or self._streams.finished(copy.copied)


@dataclass(frozen=True)
class _Place:
    """Where a tensor stands in the list of those that are copied."""

    number: int


def leaves(arrays: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested batch with a name that says where it stands."""
    if isinstance(arrays, Mapping):
        for key, value in arrays.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(arrays, list | tuple):
        for number, value in enumerate(arrays):
            yield from leaves(value, f"{name}.{number}")
    else:
        yield name, arrays


def each(act: Callable[[Any], Any], value: Any) -> Any:
    """The same nested value with something done to every leaf."""
    if isinstance(value, Mapping):
        return {name: each(act, inner) for name, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each(act, inner) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(each(act, inner) for inner in value)
    return act(value)
