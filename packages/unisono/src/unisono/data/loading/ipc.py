"""Sends objects between processes over a socket: arrays out of band, and large ones through shared memory.

The shared memory is anonymous (`memfd_create`): it is freed with the last process that holds it, however that ends, and
is not limited by `/dev/shm`. Writing 16 MB and mapping them takes a third of the time that the socket would take.
What fits into the socket's buffer goes over the socket, which is faster; with more, the sender would have to wait for
the receiver.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from unisono.runtime.files import write_all

_HEAD = struct.Struct("<QQ")  # number of parts, the pickle first; 1 if they come through shared memory
_ALIGNED = 64
_COPY_LIMIT = 1 << 21  # up to this many bytes, shared memory is copied: 1 ms in the receiving thread
_REMAP_LIMIT = 1 << 16  # from this many bytes on, a memory-mapped array is mapped again instead of sent


class IpcMessage:
    """A pickled object that can be sent any number of times; its receivers share the memory of its large arrays.

    Args:
        value: the object.
        shared: size in bytes from which on it goes through shared memory.
    """

    def __init__(self, value: Any, shared: int = 1 << 17) -> None:
        buffers: list[pickle.PickleBuffer] = []
        with io.BytesIO() as file:
            _Pickler(file, 5, buffer_callback=buffers.append).dump(value)
            self._parts = [memoryview(file.getvalue()), *(buffer.raw() for buffer in buffers)]
        self._sizes = np.array([part.nbytes for part in self._parts], dtype=np.int64)
        self._shared = hasattr(os, "memfd_create") and self.size >= shared
        self._memory: int | None = None

    def __contains__(self, text: bytes) -> bool:
        return text in bytes(self._parts[0])

    @property
    def size(self) -> int:
        """Size in bytes."""
        return int(self._sizes.sum())

    def send(self, to: socket.socket) -> None:
        """Send it."""
        head = _HEAD.pack(len(self._sizes), self._shared) + self._sizes.tobytes()
        if not self._shared:
            to.sendall(b"".join([head, *self._iter_padded()]))
            return
        if self._memory is None:
            self._memory = os.memfd_create("unisono", os.MFD_CLOEXEC)
            for part in self._iter_padded():
                write_all(self._memory, part)
        to.sendall(head)
        socket.send_fds(to, [b"m"], [self._memory])

    def close(self) -> None:
        """Release its shared memory, which lives on while receivers use it."""
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def _iter_padded(self) -> Iterator[bytes | memoryview]:
        for part in self._parts:
            yield part
            yield bytes(-part.nbytes % _ALIGNED)


def send(to: socket.socket, value: Any) -> None:
    """Send an object once."""
    message = IpcMessage(value)
    try:
        message.send(to)
    finally:
        message.close()


def receive(source: socket.socket, mapped: bool = False) -> Any:
    """Receive the next object; its arrays are writable.

    Args:
        source: the socket.
        mapped: never copy large arrays out of shared memory. Best for long-lived objects, since unmapping takes time.

    Raises:
        EOFError: if the sender has closed the connection.
    """
    count, shared = _HEAD.unpack(_receive_exactly(source, _HEAD.size))
    sizes = np.frombuffer(_receive_exactly(source, 8 * count), dtype=np.int64)
    ends = np.cumsum(sizes + -sizes % _ALIGNED)
    total = int(ends[-1])
    if not shared:
        memory = np.empty(total, dtype=np.uint8).data
        _receive_into(source, memory)
    else:
        _, [descriptor], *_ = socket.recv_fds(source, 1, 1)
        try:
            if mapped or total > _COPY_LIMIT:
                memory = memoryview(mmap.mmap(descriptor, total, flags=mmap.MAP_PRIVATE))
            else:
                memory = np.empty(total, dtype=np.uint8).data
                _read_into(descriptor, memory)
        finally:
            os.close(descriptor)
    starts = (ends - sizes - -sizes % _ALIGNED).tolist()
    pickled, *buffers = (memory[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True))
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, and arrays mapped from a file as a mapping to be opened by the receiver."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return _reduce_mapped(value) or NotImplemented
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not getattr(torch, "Tensor", None):  # which a thread may be importing
            return NotImplemented
        plain = value.layout == torch.strided and value.device.type == "cpu" and not value.requires_grad
        if not plain or not value.numel() or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _rebuild_tensor, (flat, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _rebuild_tensor(flat: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.from_numpy(flat).view(getattr(torch, dtype)).reshape(shape)


def _reduce_mapped(array: np.ndarray[Any, Any]) -> Any:
    """How to map an array's file again; None if the array is not memory-mapped."""
    if array.nbytes < _REMAP_LIMIT or not array.flags.c_contiguous:
        return None
    owner: Any = array
    while isinstance(owner, np.ndarray) and not (isinstance(owner, np.memmap) and isinstance(owner.base, mmap.mmap)):
        owner = owner.base
    if owner is None or getattr(owner, "filename", None) is None or owner.mode == "c":
        return None
    offset = owner.offset + array.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
    return _map_file, (str(owner.filename), array.dtype, owner.mode.replace("w+", "r+"), offset, array.shape)


def _map_file(path: str, dtype: Any, mode: Any, offset: int, shape: tuple[int, ...]) -> Any:
    return np.memmap(path, dtype, mode, offset, shape)


def _read_into(descriptor: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        done += os.preadv(descriptor, [memory[done:]], done)


def _receive_exactly(source: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _receive_into(source, memoryview(data))
    return data


def _receive_into(source: socket.socket, rest: memoryview) -> None:
    while len(rest):
        count = source.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
