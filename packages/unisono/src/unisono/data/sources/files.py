"""The rows of many files as one source, accessed by index or block by block.

Open files and recent blocks are in bounded caches that threads share. A copy in another process starts with file names
and sizes only, and opens files on demand.
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

from unisono.data.sources import index
from unisono.data.sources.cache import LruCache
from unisono.data.sources.change_detection import find_change
from unisono.data.sources.column_schema import ColumnRequest, ColumnType, is_list, is_number, is_same_type, unwrap_type
from unisono.data.sources.discovery import FORMATS_GROUP, Found, Place, digest_ends, find
from unisono.data.sources.formats import arrow, delimited, lines, npy, parquet
from unisono.data.sources.storage import File, wrap_read_errors
from unisono.data.views import locate_row
from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError, DataError, nearest
from unisono.runtime.remote import DEADLINE, is_remote, remote_options

log = logging.getLogger(__name__)
_OPEN_BYTES = 256e6  # memory for open files: their footers and indices
_MIN_READER_BYTES = 16384.0  # minimum counted per file, to bound the number of memory maps
_OPEN_THREADS = 16  # files opened at a time when a source is opened
_LENGTH = "length"  # default name of a column of lengths


class RowBlock(Protocol):
    """Rows that are read as a unit."""

    weight: int

    def __len__(self) -> int: ...
    def __getitem__(self, row: int) -> dict[str, Any]: ...
    def __iter__(self) -> Iterator[dict[str, Any]]: ...


class FileReader(Protocol):
    """Reads a file of one of the formats.

    Attributes:
        schema: of all its columns, a `pyarrow.Schema`.
        rows: number of rows of each block, (blocks,).
        digest: of the format's metadata about the content.
        weight: memory in bytes while it is open.
    """

    weight: int
    schema: Any
    rows: NDArray[np.int64]
    digest: str

    def block(self, number: int) -> RowBlock:
        """The rows of a block."""

    def lengths(self, column: str) -> NDArray[np.int64]:
        """Units of each row, from a column of integers or lists, (rows,)."""


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
    duplicates: Literal["refuse", "allow"] = "refuse",
    cache_mb: float = 256.0,
    storage: Mapping[str, Any] | None = None,
    deadline: float = DEADLINE,
    key: str = "data.path",
) -> Files:
    """Open files as an indexable source of rows.

    Args:
        paths: files, directories, globs and URLs, or a list of them, in order; files in a directory are sorted.
        columns: to read. If it is a string, records are that column's values; None for all columns.
        format: `arrow`, `parquet`, `jsonl`, `text`, `npy`, `csv`, `tsv` or that of a plug-in, if suffixes do not
            determine it.
        expect: types of columns, e.g. `{"audio.bytes": "bytes", "label": "int64?"}`; `?` allows nulls.
        pattern: glob that file names must match.
        split: which split of a saved `DatasetDict`.
        separator: between the documents of a text file; None if a file is one document.
        duplicates: whether to reject files listed twice, or with identical content.
        cache_mb: MB of blocks to cache, in addition to the last one.
        storage: fsspec options for URLs.
        deadline: timeout in seconds for an answer from a remote file system.
        key: the setting that contains the paths, for errors.

    Raises:
        DataError: if something cannot be found, read or used, with file, column, row and remedy.
        ConfigError: for invalid arguments.
    """
    known = {*_READERS, *find_entry_points(FORMATS_GROUP)}
    if format is not None and format not in known:
        raise ConfigError(f"format='{format}' is not known, {nearest(format, known)}")
    names = [columns] if isinstance(columns, str) else columns
    wanted = ColumnRequest.parse(names, expect, separator)
    where = remote_options(storage, deadline)
    found = find(paths, pattern, split, format=format, where=where, duplicates=duplicates, key=key)
    return Files(found, wanted, bare=isinstance(columns, str), cache_mb=cache_mb, key=key)


def records(file: File, wanted: ColumnRequest) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a file, in bounded memory and without an index.

    Raises:
        DataError: naming file, row and column.
    """
    if file.format in ("jsonl", "text"):
        return lines.read_records(file, wanted)
    if file.format == "parquet":
        return parquet.ParquetReader(file, wanted).records()
    reader = _open_reader(file, wanted)
    return (record for number in range(len(reader.rows)) for record in reader.block(number))


def _open_reader(file: File, wanted: ColumnRequest) -> FileReader:
    reader = _READERS.get(file.format) or find_entry_points(FORMATS_GROUP)[file.format].load()
    opened: FileReader = reader(file, wanted)
    return opened


@dataclass(frozen=True)
class _SourceFile:
    """A file as it was when the source was opened, the rows of its blocks, and a digest of its ends and metadata."""

    file: File
    rows: NDArray[np.int64]  # (blocks,)
    digest: str


class Files:
    """The rows of files as an indexable source; see `open_source`.

    Attributes:
        shards: the files that have rows, in order.
        ignored: names of files that were skipped: other suffixes, or no rows.
        blocks: rows of each block, (blocks,): record batches, row groups, groups of lines.
        schema: of all columns, a `pyarrow.Schema`; for JSON, inferred from the first lines.
        fingerprint: of the files' sizes, row counts, ends and metadata, but not their names.
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
        self._first_block = np.cumsum([0, *(len(shard.rows) for shard in self.shards)])
        said = "\n".join(f"{shard.rows.sum()} {shard.digest}" for shard in self.shards)
        self.fingerprint = hashlib.sha256(said.encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, row: int) -> Any:
        """A record: a dict of the columns, or a value if `columns` was a string."""
        block, inside = locate_row(self._ends, row)
        return self._unwrap(self._block(block)[inside])

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
        """Cache at least this many blocks, whatever their size: those whose rows are shuffled together."""
        self._least = self._blocks.least = max(1, count)

    @cached_property
    def lengths(self) -> NDArray[np.int64] | None:
        """Units of each row, (rows,): the integer column `length`, or else from the only column of number lists."""
        column = self._length_column()
        if column is None:
            return None
        each = [
            index.cached_array(shard.file, f"lengths {column}", lambda i=i: self._reader(i).lengths(column))  # type: ignore[misc]
            for i, shard in enumerate(self.shards)
        ]
        return np.concatenate(each)

    @property
    def remote(self) -> bool:
        """Whether rows are read from a URL."""
        return any(is_remote(shard.file.path) for shard in self.shards)

    @property
    def manifest(self) -> dict[str, Any]:
        """The files as JSON, for `check_same` when the source is reopened."""
        files = [{"name": s.file.name, "rows": int(s.rows.sum()), "digest": s.digest} for s in self.shards]
        return {"fingerprint": self.fingerprint, "files": files}

    def check_same(self, before: Mapping[str, Any]) -> None:
        """Raise if the data differ from those of an earlier `manifest`.

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
        """Raise if a file has changed since it was opened; checks every `shares`-th file from number `share` on.

        A file that was rewritten with the same content is logged, and reading continues. A missing file is an error
        only when it must be reopened, since mapped data remain valid.

        Raises:
            DataError: naming the first changed file.
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
        if self._process != os.getpid():  # after a fork: a thread of the parent may have held a lock
            self._reset_caches()
        file = self.shards[shard].file
        try:
            return self._blocks.get(block, lambda: self._reader(shard).block(number))
        except DataError:
            self._check_file(shard)
            if self.shards[shard].file == file:
                raise
        return self._blocks.get(block, lambda: self._reader(shard).block(number))  # rewritten with the same content

    def _reader(self, shard: int) -> FileReader:
        return self._open_reader(self.shards[shard].file)

    def _open_reader(self, file: File) -> FileReader:
        return self._readers.get((file.path, file.stamp), lambda: self._new(file))

    def _new(self, file: File) -> FileReader:
        with wrap_read_errors(file):
            return _open_reader(file, self._wanted)

    def _describe_file(self, file: File) -> tuple[_SourceFile, Any]:
        reader = self._open_reader(file)
        digest = hashlib.blake2b(reader.digest.encode(), digest_size=16)
        digest.update(digest_ends(file))
        return _SourceFile(file, reader.rows, digest.hexdigest()), reader.schema

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


_PROCESS_LOCAL = ("_blocks", "_readers", "_lock")  # attributes that are not pickled


def _check_same_columns(schemas: Sequence[tuple[File, Any]], wanted: ColumnRequest) -> None:
    """Raise if the requested columns differ between files; JSON is checked line by line instead."""
    typed = [(file, schema) for file, schema in schemas if file.format != "jsonl"]
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
