"""Rows of many files, numbered through: any row by its number, or block by block.

What is open and what was read last are caches, so memory is bounded and threads share them; a copy for another process
takes nothing along but names and sizes, and opens what it needs when it needs it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from unisono.data.sources import arrow, delimited, index, lines, npy, parquet
from unisono.data.sources.cache import LruCache
from unisono.data.sources.change_detection import find_change
from unisono.data.sources.column_schema import ColumnRequest, ColumnType, is_list, is_number, is_same_type, unwrap_type
from unisono.data.sources.discovery import Found, Place, find
from unisono.data.sources.duplicates import digest_ends
from unisono.data.sources.storage import DEADLINE, File, RemoteOptions, options, wrap_read_errors
from unisono.runtime.errors import ConfigError, DataError, nearest

log = logging.getLogger(__name__)
Duplicates = Literal["refuse", "allow"]
_OPEN_BYTES = 256e6  # bytes of files that stay open: their maps, footers and indices, no handles
_MIN_READER_BYTES = 16384.0  # bytes of one at least, so that there are no more maps than a system allows
_OPEN_THREADS = 16  # files that are looked at together before the start
_LENGTH = "length"  # the column of lengths that is looked for


class RowBlock(Protocol):
    """Rows that are read together."""

    weight: int

    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class FileReader(Protocol):
    """A file of one of the formats.

    Attributes:
        schema: of all its columns, a `pyarrow.Schema`.
        rows: of each block, (blocks,).
        digest: of what the format says of its content.
        weight: bytes of memory that it takes while it is open.
    """

    weight: int
    schema: Any
    rows: NDArray[np.int64]
    digest: str

    def block(self, number: int) -> RowBlock:
        """The rows of a block."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Units of each row, by a column of integers or of lists, (rows,)."""


_READERS: dict[str, Callable[[File, ColumnRequest], FileReader]] = {
    "arrow": arrow.ArrowReader,
    "parquet": parquet.ParquetReader,
    "jsonl": lines.LineReader,
    "text": lambda file, wanted: (
        lines.LineReader(file, wanted) if wanted.separator else lines.DocumentReader(file, wanted)
    ),
    "npy": npy.NpyReader,
    "csv": delimited.DelimitedReader,
    "tsv": delimited.DelimitedReader,
}


def open_source(
    paths: Place | Sequence[Place],
    columns: str | Sequence[str] | None = None,
    *,
    format: str | None = None,
    expect: Mapping[str, str] | None = None,
    pattern: str = "*",
    split: str | None = None,
    separator: str | None = None,
    duplicates: Duplicates = "refuse",
    cache_mb: float = 256.0,
    storage: Mapping[str, Any] | None = None,
    deadline: float = DEADLINE,
    key: str = "data.path",
) -> Files:
    """The rows of files, by number.

    Args:
        paths: files, directories, globs and URLs, or a list of them, in order; each directory's files by name.
        columns: of the records; one as text, and a record is that column's value; None for all.
        format: `arrow`, `parquet`, `jsonl`, `text` or `npy`, where the endings do not tell.
        expect: types of columns, e.g. `{"audio.bytes": "bytes", "label": "int64?"}`; `?` allows nulls.
        pattern: glob that file names must match.
        split: which split of a saved `DatasetDict`.
        separator: between the documents of a text file; None where a file is one.
        duplicates: of a file that is there twice, under its own name or with the content of another.
        cache_mb: MB of blocks that are kept, besides the last one.
        storage: options of the file system of URLs, as fsspec has them.
        deadline: seconds that a remote file system may take for an answer.
        key: the setting that holds the paths, for errors.

    Raises:
        DataError: for what cannot be found, read or used, with file, column, row and remedy.
        ConfigError: for arguments that make no sense.
    """
    if format is not None and format not in _READERS:
        raise ConfigError(f"format='{format}' is not known, {nearest(format, _READERS)}")
    asked = [columns] if isinstance(columns, str) else columns
    wanted = ColumnRequest.of(asked, expect, separator)
    where = RemoteOptions(options(storage), deadline)
    found = find(paths, pattern, split, format=format, where=where, duplicates=duplicates, key=key)
    return Files(found, wanted, bare=isinstance(columns, str), cache_mb=cache_mb, key=key)


def records(file: File, wanted: ColumnRequest) -> Iterator[dict[str, Any]]:
    """The rows of a file from begin to end, in bounded memory and without an index.

    Raises:
        DataError: naming file, row and column.
    """
    if file.format in ("jsonl", "text"):
        return lines.read_records(file, wanted)
    return iter(_READERS[file.format](file, wanted))


@dataclass(frozen=True)
class SourceFile:
    """A file, as it was before the start.

    Attributes:
        file: that it is.
        rows: of each block, (blocks,).
        digest: of its size, its ends and what its format says of its content.
    """

    file: File
    rows: NDArray[np.int64]
    digest: str


class Files:
    """The rows of files, by number; see `open_source`.

    Attributes:
        shards: the files that have rows, in order.
        ignored: names of files that were passed over: other endings, or no rows.
        blocks: rows of each block, (blocks,): record batches, row groups, stretches of lines.
        schema: of all columns, a `pyarrow.Schema`; of JSON what the first lines look like.
        fingerprint: of the files: sizes, row counts, their ends and metadata. Not of their names.
    """

    def __init__(
        self,
        found: Found,
        wanted: ColumnRequest,
        *,
        bare: bool = False,
        cache_mb: float = 256.0,
        key: str = "data.path",
    ) -> None:
        self._wanted, self._bare, self._budget, self._least = wanted, bare, cache_mb * 1e6, 1
        self._reset_caches()
        with ThreadPoolExecutor(min(_OPEN_THREADS, len(found.files)), thread_name_prefix="unisono-source") as pool:
            seen = list(pool.map(self._describe_file, found.files))
        filled = [shard for shard, _ in seen if shard.rows.sum()]
        empty = [shard.file.name for shard, _ in seen if not shard.rows.sum()]
        if not filled:
            raise DataError(
                f"{key}: {', '.join(empty[:5])}{', …' if len(empty) > 5 else ''} contain no rows; "
                "check the path, and that the files were written completely"
            )
        self.shards, self.ignored = tuple(filled), (*found.ignored, *empty)
        schemas = [(shard.file, schema) for shard, schema in seen if shard.rows.sum()]
        _check_same_columns(schemas, wanted)
        self.schema = schemas[0][1]
        self.blocks: NDArray[np.int64] = np.concatenate([shard.rows for shard in self.shards])
        self._ends = np.cumsum(self.blocks)
        self._size = int(self._ends[-1])
        self._first_block = np.cumsum([0, *(len(shard.rows) for shard in self.shards)])
        said = "\n".join(f"{shard.rows.sum()} {shard.digest}" for shard in self.shards)
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, row: int) -> Any:
        """A record: a dict of the columns, or the value of the only one."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        block = int(self._ends.searchsorted(row, side="right"))
        return self._unwrap(self._block(block)[int(row) - int(self._ends[block] - self.blocks[block])])

    def __iter__(self) -> Iterator[Any]:
        return (self._unwrap(record) for block in range(len(self.blocks)) for record in self._block(block))

    def read_block(self, block: int) -> list[Any]:
        """All records of a block, in order."""
        if not 0 <= block < len(self.blocks):
            raise IndexError(f"block {block} of {len(self.blocks)}")
        return [self._unwrap(record) for record in self._block(block)]

    def read(self, first: int, last: int) -> Iterator[Any]:
        """The records `first..last-1`, in order, read block by block."""
        for block in range(int(self._ends.searchsorted(first, side="right")), len(self.blocks)):
            begin = int(self._ends[block] - self.blocks[block])
            if begin >= last:
                return
            yield from self.read_block(block)[max(0, first - begin) : last - begin]

    def keep_blocks(self, count: int) -> None:
        """Keep so many blocks at least, whatever their size: those among which rows are shuffled."""
        self._least = self._blocks.least = max(1, count)

    @cached_property
    def lengths(self) -> NDArray[np.int64] | None:
        """Units of each row, (rows,): a column of integers called `length`, else of the only list of numbers."""
        column = self._length_column()
        if column is None:
            return None
        each = [
            index.cached_array(shard.file, f"lengths {column}", lambda i=i: self._reader(i).lengths(column))  # type: ignore[misc]
            for i, shard in enumerate(self.shards)
        ]
        return np.concatenate(each)

    @property
    def manifest(self) -> dict[str, Any]:
        """The files as JSON, for `check_same` when the source is opened again."""
        files = [{"name": s.file.name, "rows": int(s.rows.sum()), "digest": s.digest} for s in self.shards]
        return {"fingerprint": self.fingerprint, "files": files}

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Refuse other data than those of an earlier `manifest`.

        Raises:
            DataError: naming the first file that differs.
        """
        if before["fingerprint"] != self.fingerprint:
            what = find_change(before["files"], self.manifest["files"])
            raise DataError(
                f"the data changed since the last start: {what or 'their files are read differently'}. Restore the "
                "files, or start a new run"
            )

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Refuse files that have changed since they were opened, as far as they are those of this share of them.

        A file that was written again with the same content is logged, and reading continues. A missing file is an error
        only when it is read, since what is open of it is unchanged.

        Raises:
            DataError: naming the first that has changed.
        """
        numbers = range(share, len(self.shards), shares)
        with ThreadPoolExecutor(_OPEN_THREADS, thread_name_prefix="unisono-source") as pool:
            for _ in pool.map(self._check_file, numbers):
                pass

    def _check_file(self, number: int) -> None:
        shard = self.shards[number]
        with wrap_read_errors(shard.file):
            try:
                now = shard.file.now()
            except FileNotFoundError:
                return
        if now == shard.file:
            return
        if now.size != shard.file.size or (again := self._describe_file(now)[0]).digest != shard.digest:
            raise shard.file.changed_error(now)
        log.warning("%s was written again with the same size, ends and index; reading continues", now.path)
        with self._lock:
            self.shards = (*self.shards[:number], again, *self.shards[number + 1 :])

    def _length_column(self) -> str | None:
        types = dict(self._wanted.types)
        kinds = {field.name: unwrap_type(field.type) for field in self.schema}
        if _LENGTH in kinds and pa.types.is_integer(kinds[_LENGTH]):
            return _LENGTH
        chosen = self._wanted.columns or tuple(kinds)
        lists = [n for n in chosen if n in kinds and is_list(kinds[n]) and is_number(unwrap_type(kinds[n].value_type))]
        lists = [name for name in lists if types.get(name, ColumnType("list")).word == "list"]
        return lists[0] if len(lists) == 1 else None

    def _unwrap(self, record: dict[str, Any]) -> Any:
        return next(iter(record.values())) if self._bare else record

    def _block(self, block: int) -> RowBlock:
        shard = int(self._first_block.searchsorted(block, side="right")) - 1
        number = block - int(self._first_block[shard])
        if self._process != os.getpid():  # after a fork: a thread that is not here may have held a lock
            self._reset_caches()
        file = self.shards[shard].file
        try:
            return self._blocks.get(block, lambda: self._reader(shard).block(number))
        except DataError:
            self._check_file(shard)
            if self.shards[shard].file == file:
                raise
        return self._blocks.get(block, lambda: self._reader(shard).block(number))  # written again, as it was

    def _reader(self, shard: int) -> FileReader:
        return self._open_reader(self.shards[shard].file)

    def _open_reader(self, file: File) -> FileReader:
        return self._readers.get((file.path, file.stamp), lambda: self._new(file))

    def _new(self, file: File) -> FileReader:
        with wrap_read_errors(file):
            return _READERS[file.format](file, self._wanted)

    def _describe_file(self, file: File) -> tuple[SourceFile, Any]:
        reader = self._open_reader(file)
        digest = hashlib.blake2b(reader.digest.encode(), digest_size=16)
        digest.update(digest_ends(file))
        return SourceFile(file, reader.rows, digest.hexdigest()), reader.schema

    def _reset_caches(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._blocks: LruCache[RowBlock] = LruCache(
            self._budget, self._least, weigh=lambda block: block.weight + 1024.0
        )
        self._readers: LruCache[FileReader] = LruCache(
            _OPEN_BYTES, weigh=lambda reader: reader.weight + _MIN_READER_BYTES
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _PROCESS_LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_caches()


_PROCESS_LOCAL = ("_blocks", "_readers", "_lock")  # parts of a source


def _check_same_columns(schemas: Sequence[tuple[File, Any]], wanted: ColumnRequest) -> None:
    """Refuse files whose columns differ, in those that are asked for; JSON is held to its types line by line."""
    typed = [(file, schema) for file, schema in schemas if file.format not in ("jsonl",)]
    for file, schema in typed[1:]:
        first, other = typed[0]
        names = wanted.columns or other.names
        missing = sorted(set(names).symmetric_difference(schema.names)) if wanted.columns is None else []
        if missing:
            having, not_having = (first, file) if missing[0] in other.names else (file, first)
            raise DataError(
                f"{not_having.path} has no column '{missing[0]}', but {having.path} has; select columns that all "
                "files have, or open them as separate sources"
            )
        for name in names:
            one, two = other.field(name).type, schema.field(name).type
            if not is_same_type(one, two):
                raise DataError(
                    f"column '{name}' is {one} in {first.path} and {two} in {file.path}; write all files with the same "
                    "types, or open them as separate sources"
                )
