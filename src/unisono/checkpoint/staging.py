"""A copy of the state as it is now, in memory of this host, so that training can go on while it is written.

It costs memory for one copy of what this process saves. The memory is kept from save to save: to ask for it anew would
cost about as much time as to fill it. What lies on an accelerator is copied into pinned memory on a stream of its own;
the device's next work waits for these copies, and this process does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from unisono.state import Shard

_SYNCHRONOUS = ("cpu", "mps")  # devices without copies beside the computation


class Staging:
    """Memory for copies of shards, used again by the next save."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._copied: list[torch.Event] = []

    def copy(self, shards: Sequence[Shard]) -> list[Shard]:
        """The same shards with their content of now, on the CPU. It may be read only after `wait`.

        The copies of a call before are overwritten.
        """
        kept = {}
        streams = self._begin({shard.data.device for shard in shards if _beside(shard.data)})
        result = []
        for shard in shards:
            data: torch.Tensor = shard.data.detach()
            key = (shard.name, shard.offset)
            memory = self._kept.get(key)
            if memory is None or memory.shape != data.shape or memory.dtype != data.dtype:
                memory = torch.empty(data.shape, dtype=data.dtype, pin_memory=_beside(data))
            if not _beside(data):
                memory.copy_(data)
            else:
                with streams[data.device]:
                    memory.copy_(data, non_blocking=True)
                    data.record_stream(streams[data.device])  # or what was freed could be overwritten before it is read
            kept[key] = memory
            result.append(replace(shard, data=memory))
        self._kept = kept
        self._end(streams)
        return result

    def wait(self) -> None:
        """Return once all copies are made; in whatever thread."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

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


def _beside(data: torch.Tensor) -> bool:
    return data.device.type not in _SYNCHRONOUS
