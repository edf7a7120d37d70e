"""Writes pieces of arrays to safetensors files, hashing while writing, and reads them back in any other partition.

The format is an eight-byte length, a JSON header and raw bytes. It is written here because the safetensors library
needs all tensors of a file at once and computes no hashes; the library can read these files. Large pieces are split
along their first axis, so that several processes can verify them, and none has to read all of one for a part of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.engines import host_arrays
from unisono.engines.host_arrays import Array
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Json
from unisono.runtime.errors import CheckpointError
from unisono.runtime.files import write_all
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object

MAX_PIECE_BYTES = 64 << 20  # limit of a piece, unless a single index of its first axis is larger
_PAIR_DTYPES = ("complex128",)  # not supported by safetensors; written as pairs of real numbers
_CHUNK = 1 << 20  # bytes read and hashed at a time; fits into a core's cache
CODES = {  # of safetensors, by the name of a dtype
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip


def write_shards(file: Path, shards: Sequence[ArrayShard], note: dict[str, str] | None = None) -> dict[str, Any]:
    """Write pieces into one new file and flush it to disk.

    Hashing runs in threads while writing: it releases the GIL, and the content is already in memory.

    Args:
        file: must not exist.
        shards: of any framework, on any device.
        note: additional entries of the header.

    Returns:
        The manifest entries: `arrays`, and under `file` its size, its SHA-256 and those of its header.

    Raises:
        OSError: if it cannot be written.
        CheckpointError: for a dtype that safetensors does not have.
    """
    described, entries = _plan_file(file.name, shards)
    header = encode_header((_header_entry(piece["entry"], data) for piece, data in entries), note or {})
    whole = hashlib.sha256(header)
    position = len(header)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(descriptor, header)
        with ThreadPoolExecutor(1) as by_piece, ThreadPoolExecutor(1) as by_file:
            waiting: deque[tuple[dict[str, Any], Future[str], Future[None]]] = deque()
            for piece, data in entries:
                content = _as_bytes(data)
                piece["at"], piece["bytes"] = position, content.nbytes
                waiting.append((piece, by_piece.submit(_sha256, content), by_file.submit(whole.update, content.data)))
                write_all(descriptor, content.data)
                position += content.nbytes
                while len(waiting) > 4:  # limits the number of host copies of device arrays
                    _finish_piece(waiting.popleft())
            while waiting:
                _finish_piece(waiting.popleft())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    about = {"size": len(header), "sha256": hashlib.sha256(header).hexdigest()}
    return {"arrays": described, "file": {"size": position, "sha256": whole.hexdigest(), "header": about}}


def encode_header(entries: Iterable[tuple[str, str, Sequence[int], int]], note: dict[str, str]) -> bytes:
    """The beginning of a safetensors file, up to its first tensor.

    Args:
        entries: name, code of the dtype, shape and bytes of every tensor, in the order in which they follow.
        note: additional entries.
    """
    header: dict[str, Json] = {"__metadata__": note} if note else {}
    position = 0
    for name, code, shape, size in entries:
        assert name not in header, f"{name} is there twice"
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def total_bytes(shards: Sequence[ArrayShard]) -> int:
    """The size of pieces in bytes, without the header."""
    return sum(host_arrays.nbytes(shard.data) for shard in shards)


class ArrayReader:
    """Reads and verifies the arrays of a checkpoint piece by piece; see `unisono.engines.state.StateReader`.

    Safe to use from several threads: reading and hashing release the GIL. Pieces in `verified`, by file and entry, are
    not verified again.
    """

    def __init__(
        self, folder: Path, arrays: dict[str, Any], verified: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self._folder, self._arrays, self._verified = folder, arrays, verified

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shape of every array."""
        return {name: tuple(array["shape"]) for name, array in self._arrays.items()}

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """A piece of an array, assembled from the saved pieces that overlap it.

        Raises:
            CheckpointError: if the saved pieces do not cover it, or one of them is damaged.
        """
        self._check_covered(name, offset, shape)  # before allocating memory: a manifest may claim any shape
        result = np.zeros(shape, dtype=self.dtype(name))  # never what was in memory before
        self.fill(name, offset, result)
        return result

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype in which an array was saved."""
        return host_arrays.parse_dtype(self._arrays[name]["dtype"])

    def fill(self, name: str, offset: tuple[int, ...], into: Array) -> None:
        """Read a piece of an array into a contiguous array of its shape and dtype.

        Raises:
            CheckpointError: as for `read`; the memory's content is undefined if a piece is damaged.
        """
        assert into.dtype == self.dtype(name)
        assert into.flags.c_contiguous
        shape = tuple(into.shape)
        self._check_covered(name, offset, shape)
        values = _as_storable(into)
        for piece, first, last in self._find_overlaps(name, offset, shape):
            there, here = (_slices(first, last, start) for start in (piece["offset"], offset))
            shared = [b - a for a, b in zip(first, last, strict=True)]
            target = values[here]  # a view, even of an array without axes
            known = (piece["file"], piece["entry"]) in self._verified
            rows = known and shared[1:] == piece["shape"][1:]  # contiguous in the file; not hashed separately
            if (rows or shared == piece["shape"]) and target.flags.c_contiguous:
                before = (first[0] - piece["offset"][0]) * math.prod(piece["shape"][1:]) if shape else 0
                self._read_piece(name, piece, target, before * into.itemsize)
            else:
                saved = np.zeros([*piece["shape"], *values.shape[len(shape) :]], dtype=values.dtype)
                self._read_piece(name, piece, saved)
                target[...] = saved[there]

    def covers(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether the saved pieces have every element of a piece."""
        return not self._count_missing(name, offset, shape)

    def _check_covered(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if missing := self._count_missing(name, offset, shape):
            raise CheckpointError(f"{self._folder}: no file holds {missing} elements of '{name}' {shape} at {offset}")

    def _count_missing(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> int:
        found = (
            math.prod(b - a for a, b in zip(first, last, strict=True))
            for _, first, last in self._find_overlaps(name, offset, shape)
        )
        return math.prod(shape) - sum(found)

    def _find_overlaps(
        self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[dict[str, Any], list[int], list[int]]]:
        """The saved pieces that overlap a piece, each with the start and end of the overlap."""
        for piece in self._arrays[name]["pieces"]:
            first = [max(a, b) for a, b in zip(offset, piece["offset"], strict=True)]
            last = [
                min(a + n, b + m) for a, n, b, m in zip(offset, shape, piece["offset"], piece["shape"], strict=True)
            ]
            if all(a < b for a, b in zip(first, last, strict=True)):
                yield piece, first, last

    def _read_piece(self, name: str, piece: dict[str, Any], into: Array, before: int = 0) -> None:
        """Read a piece and verify it; of a verified one only what fits into the array, after the bytes `before`."""
        content = _as_bytes(into)
        file = self._folder / piece["file"]
        known = (piece["file"], piece["entry"]) in self._verified
        if content.nbytes + before > piece["bytes"] or (content.nbytes != piece["bytes"] and not known):
            raise CheckpointError(f"{self._folder}: '{name}' has a piece of {piece['bytes']} bytes in {piece['file']}")
        try:
            found = read_bytes(self._folder, piece["file"], piece["at"] + before, content.data, hashed=not known)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        if found is None or (not known and found != piece["sha256"]):
            raise CheckpointError(f"{file} is damaged: the content of '{name}' is not what was written")


def read_bytes(folder: Path, name: str, at: int, into: memoryview, *, hashed: bool = True) -> str | None:
    """Fill memory from a file and return the hash of what was read; None if the file is too short or not hashed."""
    sha256 = hashlib.sha256()
    with safe_paths.open_inside(folder, name) as opened:
        opened.seek(at)
        done = 0
        while done < len(into):
            count = opened.readinto(into[done : done + _CHUNK] if hashed else into[done:])
            if not count:
                return None
            if hashed:
                sha256.update(into[done : done + count])
            done += count
    return sha256.hexdigest()


def hash_range(file: BufferedReader, at: int, length: int) -> str | None:
    """The hash of a range of an open file; None if it is too short."""
    sha256 = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK, length)))
    file.seek(at)
    while length:
        count = file.readinto(buffer[: min(len(buffer), length)])
        if not count:
            return None
        sha256.update(buffer[:count])
        length -= count
    return sha256.hexdigest()


def header_misfit(header: bytes, pieces: Iterable[tuple[dict[str, Any], str]]) -> str | None:
    """How a file's header differs from what the manifest says of the file; None if it does not.

    Args:
        header: the beginning of the file, up to its first tensor.
        pieces: all entries of the manifest for this file, each with the dtype of its array.
    """
    try:
        entries = safe_paths.parse_json(header[8:], dict[str, Object])
        entries.pop("__metadata__", None)
        for piece, dtype in pieces:
            entry = entries.pop(piece["entry"])
            pair = dtype in _PAIR_DTYPES
            code, shape = ("F64", [*piece["shape"], 2]) if pair else (CODES.get(dtype), piece["shape"])
            begin = piece["at"] - len(header)
            if entry != {"dtype": code, "shape": shape, "data_offsets": [begin, begin + piece["bytes"]]}:
                return f"'{piece['entry']}' is {entry['dtype']} {entry['shape']}, and {dtype} {piece['shape']} there"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return f"it has the entry '{next(iter(entries))}', which is not there" if entries else None


def _plan_file(file: str, shards: Sequence[ArrayShard]) -> tuple[dict[str, Any], list[tuple[dict[str, Any], Any]]]:
    """The manifest entries of the arrays, and the pieces in file order."""
    described: dict[str, Any] = {}
    entries: list[tuple[dict[str, Any], Any]] = []
    for shard in shards:
        dtype = host_arrays.dtype_name(shard.data)
        if dtype not in CODES and dtype not in _PAIR_DTYPES:
            raise CheckpointError(f"'{shard.name}' has dtype {dtype}, which safetensors files do not support")
        array = {"shape": list(shard.shape), "dtype": dtype, "pieces": []}
        described.setdefault(shard.name, array)
        for offset, data in _split_shard(shard) if math.prod(shard.data.shape) else ():  # empty arrays are not written
            entry = f"{shard.name}@{','.join(map(str, offset))}"
            piece = {"file": file, "entry": entry, "offset": offset, "shape": list(data.shape)}
            described[shard.name]["pieces"].append(piece)
            entries.append((piece, data))
    # The widest dtype first, so that every piece is aligned.
    return described, sorted(entries, key=lambda entry: -_bytes_per_element(host_arrays.dtype_name(entry[1])))


def _split_shard(shard: ArrayShard) -> Iterator[tuple[list[int], Any]]:
    """A piece, or several along its first axis if it is large, with their offsets."""
    data = shard.data
    rows = data.shape[0] if data.shape else 1
    at_once = max(1, MAX_PIECE_BYTES * rows // max(1, host_arrays.nbytes(data)))
    if at_once >= rows:
        yield list(shard.offset), data
        return
    for first in range(0, rows, at_once):
        yield [shard.offset[0] + first, *shard.offset[1:]], data[first : first + at_once]


def _header_entry(name: str, data: Any) -> tuple[str, str, Sequence[int], int]:
    dtype, shape = host_arrays.dtype_name(data), tuple(data.shape)
    if dtype in _PAIR_DTYPES:
        dtype, shape = "float64", (*shape, 2)
    return name, CODES[dtype], shape, host_arrays.nbytes(data)


def _slices(first: Sequence[int], last: Sequence[int], start: Sequence[int]) -> tuple[Any, ...]:
    """The index of a region in a piece that starts there."""
    return *(slice(a - o, b - o) for a, b, o in zip(first, last, start, strict=True)), ...


def _bytes_per_element(dtype: str) -> int:
    """The size of a stored number in bytes."""
    return host_arrays.parse_dtype("float64" if dtype in _PAIR_DTYPES else dtype).itemsize


def _as_storable(data: Array) -> Array:
    """A view of the same memory; complex numbers without a safetensors dtype become pairs."""
    return data[..., None].view(np.float64) if data.dtype.name in _PAIR_DTYPES else data


def _as_bytes(data: Any) -> NDArray[np.uint8]:
    """An array's content as bytes; no copy if it is contiguous in host memory."""
    return np.ascontiguousarray(host_arrays.to_numpy(data)).reshape(-1).view(np.uint8)


def _sha256(content: NDArray[np.uint8]) -> str:
    return hashlib.sha256(content.data).hexdigest()


def _finish_piece(hashed: tuple[dict[str, Any], Future[str], Future[None]]) -> None:
    piece, of_piece, of_file = hashed
    piece["sha256"] = of_piece.result()
    of_file.result()
