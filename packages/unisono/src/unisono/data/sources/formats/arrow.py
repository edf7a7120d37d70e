"""Reads Arrow's IPC formats: files with a footer, and streams, as written by `datasets`.

A file is a stream between two magic strings, so both are read the same way: the message headers contain the positions
and row counts of the record batches, so opening a file does not read any data. Local batches are memory-mapped.

The layout of messages: https://arrow.apache.org/docs/format/Columnar.html#encapsulated-message-format
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.formats import tables
from unisono.data.sources.formats.tables import TableBlock
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.runtime.errors import DataError
from unisono.runtime.remote import is_remote

_MAGIC = b"ARROW1"
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages


@dataclass(frozen=True)
class _Message:
    """The position of a message, and facts from its header."""

    first: int
    last: int  # one past its last byte
    kind: int
    rows: int = 0  # of a record batch
    nulls: tuple[int, ...] = ()  # of a record batch, one per node
    buffers: tuple[tuple[int, int], ...] = ()  # places in the file, and sizes, of compressed ones

    @property
    def compressed(self) -> bool:
        """Whether its buffers are compressed."""
        return bool(self.buffers)


class ArrowReader:
    """Reads the record batches of a file."""

    def __init__(self, file: File, wanted: ColumnRequest) -> None:
        self._file, self._wanted = file, wanted
        digest = hashlib.blake2b(digest_size=16)
        with wrap_read_errors(file), file.open() as source:
            messages = list(_messages(file, source, digest))
            self.schema = pa.ipc.read_schema(pa.py_buffer(_read_range(source, messages[0].first, messages[0].last)))
            self._content = None if is_remote(file.path) else file.content()
        wanted.check(file.path, self.schema)
        batches = [message for message in messages if message.kind == _BATCH]
        self._head = messages[0]
        self._dictionaries = [message for message in messages if message.kind == _DICTIONARY]
        self._batches = batches
        self._compressed = any(message.compressed for message in batches)
        for message in batches:
            file.check_rows(message.rows)
        file.check_rows(sum(message.rows for message in batches))
        self.rows = np.array([message.rows for message in batches], dtype=np.int64)
        self._firsts = np.cumsum([0, *self.rows])
        self.digest, self.weight = digest.hexdigest(), 64 * len(messages)
        self._names = list(wanted.columns or self.schema.names)
        self._check_nulls(batches)

    def block(self, number: int) -> TableBlock:
        """A record batch."""
        with wrap_read_errors(self._file):
            batch = self._batch(number, self._names)
        mapped = self._content is not None and not self._compressed
        first = int(self._firsts[number])
        return TableBlock(batch, self._file.path, first, self._wanted, 0 if mapped else batch.nbytes)

    def lengths(self, column: str) -> NDArray[np.int64]:
        """The lengths of a column's lists, or the values of an integer column, (rows,)."""
        with wrap_read_errors(self._file):
            each = [tables.column_lengths(self._batch(number, [column]).column(0)) for number in range(len(self.rows))]
        return np.concatenate([np.zeros(0, dtype=np.int64), *each])

    def _batch(self, number: int, names: list[str]) -> Any:
        message = self._batches[number]
        first, last = message.first, message.last
        before = [message for message in self._dictionaries if message.first < first]
        if self._content is not None and not before and not self._compressed:
            batch = pa.ipc.read_record_batch(self._content.slice(first, last - first), self.schema).select(names)
            batch.validate()  # refuses buffers that are too short
            return batch
        with self._file.open() as source:  # builds a stream of only what this batch needs
            needed = (self._head, *before, message)
            parts = [_read_range(source, part.first, part.last) for part in needed]
        unpacked = sum(_unpacked_size(part, content) for part, content in zip(needed, parts, strict=True))
        self._file.check_unpacked(unpacked, f"record batch {number}")
        chosen = [self.schema.get_field_index(name) for name in names]
        options = pa.ipc.IpcReadOptions(included_fields=sorted(chosen))
        with pa.ipc.open_stream(pa.BufferReader(b"".join(parts)), options=options) as reader:
            batch = reader.read_next_batch().select(names)
            batch.validate()
            return batch

    def _check_nulls(self, batches: list[_Message]) -> None:
        """Reject nulls in columns that must have none, as far as the headers show: for top-level columns."""
        nodes = np.cumsum([0, *(_count_nodes(field.type) for field in self.schema)])
        for steps in self._wanted.without_nulls:
            node = int(nodes[self.schema.get_field_index(steps[0])]) if steps[0] in self.schema.names else -1
            for number, message in enumerate(batches):
                if len(steps) == 1 and 0 <= node < len(message.nulls) and message.nulls[node]:
                    for _ in self.block(number):  # finds the row, and raises
                        pass


def _messages(file: File, source: Any, digest: Any) -> Iterator[_Message]:
    """The messages of a file or a stream, in order, up to its end marker."""
    framed = source.read(len(_MAGIC)) == _MAGIC
    if framed:
        source.seek(file.size - len(_MAGIC))
        if source.read(len(_MAGIC)) != _MAGIC:
            raise _damaged_error(file, "it is truncated: its end marker is missing")
    at, kind = 8 if framed else 0, 0
    while True:
        source.seek(at)
        head = bytes(source.read(8))
        marked = head[:4] == b"\xff" * 4  # Arrow before 0.15 had no such mark
        start = 8 if marked else 4
        if len(head) < start:
            raise _damaged_error(file, "it is truncated: its end marker is missing" if at else "it is empty")
        size = struct.unpack("<i", head[start - 4 : start])[0]
        if size == 0 and kind:
            return
        if size <= 0 or at + start + size > file.size:
            raise _damaged_error(
                file, "it is truncated in a message" if kind else "it is neither an Arrow file nor a stream"
            )
        source.seek(at + start)
        meta = bytes(source.read(size))
        try:
            message = _message(at, at + start + size, meta)
        except (struct.error, IndexError, OverflowError) as error:
            raise _damaged_error(file, f"the header of the message at byte {at} is invalid") from error
        if message.last > file.size:
            raise _damaged_error(file, "it is truncated in a record batch")
        if kind == 0 and message.kind != _SCHEMA:
            raise _damaged_error(file, "it does not begin with a schema")
        digest.update(meta)
        kind, at = message.kind, message.last
        yield message


def _message(first: int, body: int, meta: bytes) -> _Message:
    """Parse a message header: a flatbuffer `Message` that wraps a `Schema`, `DictionaryBatch` or `RecordBatch`."""
    message = _FlatTable(meta, struct.unpack_from("<I", meta, 0)[0])
    kind, size = message.number(1, "<B"), message.number(3, "<q")
    if size < 0:
        raise IndexError(size)
    if kind not in (_BATCH, _DICTIONARY):
        return _Message(first, body + size, kind)
    batch = message.table(2) if kind == _BATCH else message.table(2).table(1)
    buffers: tuple[tuple[int, int], ...] = ()
    if batch.offset(3):
        count, at = batch.vector(2)
        found = (struct.unpack_from("<qq", meta, at + 16 * buffer) for buffer in range(count))
        buffers = tuple((body + begin, length) for begin, length in found)
    if kind == _DICTIONARY:
        return _Message(first, body + size, kind, buffers=buffers)
    count, nodes = batch.vector(1)
    nulls = tuple(struct.unpack_from("<qq", meta, nodes + 16 * node)[1] for node in range(count))
    return _Message(first, body + size, kind, batch.number(0, "<q"), nulls, buffers)


def _unpacked_size(message: _Message, content: bytes) -> int:
    """Bytes of a message's compressed buffers once unpacked: each begins with its own size, which Arrow reserves."""
    sizes = [
        struct.unpack_from("<q", content, begin - message.first)[0] for begin, length in message.buffers if length >= 8
    ]
    return sum(max(0, size) for size in sizes)  # -1: this one is not compressed


class _FlatTable:
    """A table of a flatbuffer (https://flatbuffers.dev/internals/)."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at
        self._fields = at - struct.unpack_from("<i", content, at)[0]
        self._size = struct.unpack_from("<H", content, self._fields)[0]

    def offset(self, field: int) -> int:
        """The offset of a field in the table; 0 if it is absent."""
        place = 4 + 2 * field
        return int(struct.unpack_from("<H", self._content, self._fields + place)[0]) if place < self._size else 0

    def number(self, field: int, form: str) -> int:
        """A number; 0 if it is absent."""
        offset = self.offset(field)
        return int(struct.unpack_from(form, self._content, self._at + offset)[0]) if offset else 0

    def table(self, field: int) -> _FlatTable:
        """A nested table."""
        return _FlatTable(self._content, self._target(field))

    def vector(self, field: int) -> tuple[int, int]:
        """The length of a vector, and the position of its first element."""
        if not self.offset(field):
            return 0, 0
        at = self._target(field)
        return int(struct.unpack_from("<I", self._content, at)[0]), at + 4

    def _target(self, field: int) -> int:
        at = self._at + self.offset(field)
        return at + int(struct.unpack_from("<I", self._content, at)[0])


def _read_range(source: Any, first: int, last: int) -> bytes:
    source.seek(first)
    return bytes(source.read(last - first))


def _count_nodes(kind: Any) -> int:
    """The number of nodes of a column in the header of a record batch: its own, and those of its children."""
    if isinstance(kind, pa.BaseExtensionType):
        return _count_nodes(kind.storage_type)
    if isinstance(kind, pa.DictionaryType):
        return 1
    return 1 + sum(_count_nodes(kind.field(i).type) for i in range(kind.num_fields))


def _damaged_error(file: File, what: str) -> DataError:
    return DataError(f"{file.path} cannot be read as arrow: {what}; write or copy it again")
