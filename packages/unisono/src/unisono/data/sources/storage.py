"""Access to data files by local path or URL.

Local files are memory-mapped without keeping a handle; remote ones are read by `unisono.runtime.remote`.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import DataError
from unisono.runtime.remote import RemoteOptions, is_remote, open_remote, stream_remote
from unisono.runtime.text import format_bytes
from unisono.runtime.untrusted import safe_paths

_READ_AHEAD = 1 << 20  # bytes that are unpacked at a time
_RATIO, _FREE = 200, 64 << 20  # limits of decompression: bytes per compressed byte, and bytes always allowed
_TABLE_FREE = 1 << 30  # as `_FREE`, of a block of a binary table
MAX_ROW = 1 << 30  # bytes; a row that has more is refused before it is read
_ROWS_PER_BYTE = 4096  # limit of rows per byte of a file; real files have fewer, even with run-length encoding
TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir


def create_cache_folder(folder: Path) -> None:
    """Create a directory for derived files, tagged so that searches for data skip it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TAG).is_file():
        (folder / TAG).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# made by unisono\n", encoding="ascii")


@dataclass(frozen=True)
class File:
    """A data file, as it was when it was found.

    Attributes:
        path: local path or URL.
        format: `arrow`, `parquet`, `jsonl`, `text`, `npy`, `csv` or `tsv`.
        name: relative to where it was found; determines its place in the order.
        size: in bytes.
        stamp: modification time, or a content hash or version from the object store.
        where: options for remote files.
        folder: in which it was found, and out of which no link is followed; None if the user named the file itself.
    """

    path: str
    format: str
    name: str
    size: int
    stamp: str
    where: RemoteOptions = field(default_factory=RemoteOptions)
    folder: str | None = None

    @classmethod
    def from_path(
        cls, path: Path, format: str, name: str, where: RemoteOptions | None = None, folder: str | None = None
    ) -> File:
        """A local file in its current state."""
        status = path.stat()
        return cls(str(path), format, name, status.st_size, str(status.st_mtime_ns), where or RemoteOptions(), folder)

    @property
    def is_compressed(self) -> bool:
        """Whether it is compressed with gzip."""
        return self.path.lower().endswith(".gz")

    def open(self, mapped: bool = True) -> Any:
        """Open as a `pyarrow.NativeFile`: a memory map, or a remote file. The caller closes it.

        Args:
            mapped: Whether it is mapped if it is local. To read a file that is cut off while it is mapped ends the
                process (SIGBUS). What is unpacked anyway is read in less time without, too: to map a file and to touch
                its pages takes longer than to copy 100 kB.
        """
        self.check()
        if is_remote(self.path):
            return pa.PythonFile(open_remote(self.path, self.where, self.size), mode="r")
        if not self.size:
            return pa.BufferReader(b"")
        with self._open_local() as file:
            path = safe_paths.path_of(file)
            return pa.memory_map(path) if mapped else pa.OSFile(path)

    def content(self) -> Any:
        """The whole content as a buffer of `size` bytes; memory-mapped if local, without keeping a handle."""
        with self.open() as source:
            return source.read_buffer()

    def stream(self) -> io.BufferedReader:
        """Open for sequential reading, in bounded memory. The caller closes it."""
        self.check()
        if is_remote(self.path):
            return stream_remote(self.path, self.where, self.size)
        return self._open_local()

    @contextmanager
    def open_plain(self) -> Iterator[io.BufferedReader]:
        """Open for sequential reading, decompressed if necessary; an implausible compression ratio is an error."""
        with self.stream() as raw:
            if self.is_compressed:
                with gzip.open(raw) as plain:
                    yield io.BufferedReader(_Unpacked(self, plain), buffer_size=_READ_AHEAD)
            else:
                yield raw

    def check_rows(self, rows: int) -> None:
        """Reject a row count that is implausible for the file's size, before memory is allocated for it.

        Raises:
            DataError: naming the file.
        """
        if not 0 <= rows <= _ROWS_PER_BYTE * self.size:
            raise DataError(
                f"{self.path} cannot be read as {self.format}: it claims to have {rows} rows, which {self.size} "
                "bytes cannot hold; it is damaged or forged, so write or copy it again"
            )

    def check_unpacked(self, size: int, what: str) -> None:
        """Reject a block that unpacks to more memory than is plausible, by what its headers say, before it is read.

        Raises:
            DataError: naming the file.
        """
        if size > max(_TABLE_FREE, _RATIO * self.size):
            raise DataError(
                f"{self.path}: {what} unpacks to {format_bytes(size)}, more than {format_bytes(_TABLE_FREE)} and than "
                f"{_RATIO} times the file's {self.size} bytes. It was not read; if it is intended, write the file "
                "again with smaller blocks"
            )

    def range(self, first: int, last: int) -> bytes:
        """Bytes `first..last-1`."""
        with self.open() as source:
            source.seek(first)
            return bytes(source.read(last - first))

    def now(self) -> File:
        """The file in its current state. A remote file is returned as is; its size is checked when it is read."""
        if is_remote(self.path):
            return self
        return File.from_path(Path(self.path), self.format, self.name, self.where, self.folder)

    def _open_local(self) -> io.BufferedReader:
        """Open a local file; a link put in its place since it was found cannot lead out of the folder."""
        return safe_paths.open_found(self.path, self.folder)

    def check(self) -> None:
        """Raise if a local file has changed since it was found."""
        if is_remote(self.path):
            return
        status = os.stat(self.path)  # noqa: PTH116 - each block asks, and a path takes twice as long
        if status.st_size != self.size or str(status.st_mtime_ns) != self.stamp:
            raise self.changed_error(self.now())

    def changed_error(self, now: File) -> DataError:
        """The error for a file that has changed since it was found."""
        size = f": it had {self.size} bytes and has {now.size}" if now.size != self.size else ""
        return DataError(
            f"{self.path} has changed since it was opened{size}; restore it, or start a new run with "
            "the data as they are now"
        )


@contextmanager
def wrap_read_errors(file: File) -> Iterator[None]:
    """Convert errors of reading into a `DataError` that names the file."""
    with wrap_native_errors(f"{file.path} cannot be read as {file.format}"):
        yield


class _Unpacked(io.RawIOBase):
    """The decompressed content of a file, up to a limit."""

    def __init__(self, file: File, plain: gzip.GzipFile) -> None:
        self._file, self._plain, self._left = file, plain, max(_FREE, _RATIO * file.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._plain.read1(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self._file.path} unpacks to more than {_RATIO} times its {self._file.size} bytes, which is not "
                "plausible for text; if it is intended, unpack it yourself"
            )
        buffer[: len(content)] = content
        return len(content)
