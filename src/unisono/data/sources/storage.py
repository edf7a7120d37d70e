"""Access to files by local path, or by any URL that fsspec supports.

Local files are memory-mapped without keeping a handle. Remote files are read by stateless range requests, so threads
and forked processes share nothing. Every request has a deadline: a server that disappears is an error, never a hang.
"""

from __future__ import annotations

import gzip
import io
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from unisono.runtime.errors import DataError

Options = tuple[tuple[str, Any], ...]
T = TypeVar("T")
DEADLINE = 60.0  # seconds without an answer
_PIECE_BYTES = 8 << 20  # bytes per request, so that the deadline bounds the time without progress
_READ_AHEAD = 1 << 20  # bytes that are read ahead of remote streams
_RATIO, _FREE = 200, 64 << 20  # limits of decompression: bytes per compressed byte, and bytes always allowed
_ROWS_PER_BYTE = 4096  # limit of rows per byte of a file; real files have fewer, even with run-length encoding


TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir


def derived(folder: Path) -> None:
    """Create a directory for derived files, tagged so that searches for data skip it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TAG).is_file():
        (folder / TAG).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# made by unisono\n", encoding="ascii")


@dataclass(frozen=True)
class RemoteOptions:
    """Options for remote file systems.

    Attributes:
        options: of the file system, e.g. `endpoint_url`, as pairs.
        deadline: timeout of a request in seconds.
    """

    options: Options = ()
    deadline: float = DEADLINE


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
    """

    path: str
    format: str
    name: str
    size: int
    stamp: str
    where: RemoteOptions = RemoteOptions()

    @classmethod
    def of(cls, path: Path, format: str, name: str, where: RemoteOptions | None = None) -> File:
        """A local file in its current state."""
        status = path.stat()
        return cls(str(path), format, name, status.st_size, str(status.st_mtime_ns), where or RemoteOptions())

    @property
    def compressed(self) -> bool:
        """Whether it is compressed with gzip."""
        return self.path.lower().endswith(".gz")

    def open(self) -> Any:
        """Open as a `pyarrow.NativeFile`: a memory map, or a remote file. The caller closes it."""
        self.check()
        if is_remote(self.path):
            return pa.PythonFile(_RemoteFile(self), mode="r")
        return pa.memory_map(self.path) if self.size else pa.BufferReader(b"")

    def content(self) -> Any:
        """The whole content as a buffer of `size` bytes; memory-mapped if local, without keeping a handle."""
        with self.open() as source:
            return source.read_buffer()

    def stream(self) -> io.BufferedReader:
        """Open for sequential reading, in bounded memory. The caller closes it."""
        self.check()
        if is_remote(self.path):
            return io.BufferedReader(_RemoteFile(self), buffer_size=_READ_AHEAD)
        return Path(self.path).open("rb")

    @contextmanager
    def unpacked(self) -> Iterator[io.BufferedReader]:
        """Open for sequential reading, decompressed if necessary; an implausible compression ratio is an error."""
        with self.stream() as raw:
            if self.compressed:
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

    def range(self, first: int, last: int) -> bytes:
        """Bytes `first..last-1`."""
        with self.open() as source:
            source.seek(first)
            return bytes(source.read(last - first))

    def now(self) -> File:
        """The file in its current state. A remote file is returned as is; its size is checked when it is read."""
        return self if is_remote(self.path) else File.of(Path(self.path), self.format, self.name, self.where)

    def check(self) -> None:
        """Raise if a local file has changed since it was found."""
        if (now := self.now()) != self:
            raise self.changed_error(now)

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
    try:
        yield
    except DataError:
        raise
    except (
        OSError,
        EOFError,
        zlib.error,
        pa.ArrowException,
        ValueError,
        LookupError,
        ArithmeticError,
        MemoryError,
    ) as error:
        raise DataError(f"{file.path} cannot be read as {file.format}: {error_text(error)}") from error


def error_text(error: BaseException) -> str:
    """The message of an error, or its type if it has none, as some network errors do."""
    return str(error) or type(error).__name__


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def open_filesystem(url: str, where: RemoteOptions) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    fsspec caches one per process and thread, so this is cheap and safe after a fork.

    Raises:
        DataError: if the protocol is unknown, or its package is not installed.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url, **dict(where.options))
    except ImportError as error:
        protocol = url.partition("://")[0]
        raise DataError(
            f"{url}: {protocol}:// needs a package that is not installed. {error}; e.g. "
            f"pip install {PACKAGES.get(protocol, 'the package of this protocol')}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url}: {error}; use s3, gs, az, hf, http, https, file, or another protocol of fsspec"
        ) from error
    return system, path


PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "hf": "huggingface_hub",
    "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
    "oss": "ossfs", "oci": "ocifs", "hdfs": "pyarrow", "webhdfs": "requests", "dropbox": "dropboxdrivefs",
}  # fmt: skip


def ask_remote(url: str, where: RemoteOptions, ask: Callable[[Any, str], T], done: str = "read") -> T:
    """The answer of a remote file system, within the deadline.

    If no answer comes, its thread is abandoned; as a daemon, it does not delay exit. `done` names the operation for
    errors.

    Raises:
        DataError: naming the URL, if the request fails or times out.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask(*open_filesystem(url, where)))
        except BaseException as error:  # any error is passed on to the calling thread
            errors.append(error)

    thread = threading.Thread(target=run, name="unisono-remote", daemon=True)
    thread.start()
    thread.join(where.deadline)
    if answers:
        return answers[0]
    if not errors:
        raise DataError(f"{url}: no answer within {where.deadline:g} s; check the server and the network")
    error = errors[0]
    if isinstance(error, DataError | FileNotFoundError) or not isinstance(error, Exception):
        raise error
    raise DataError(f"{url} cannot be {done}: {type(error).__name__}: {error_text(error)}") from error


def options(given: Mapping[str, Any] | None) -> Options:
    """Options of a file system, in hashable form."""
    return tuple(sorted((given or {}).items()))


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


class _RemoteFile(io.RawIOBase):
    """A remote file as a Python raw file, with a request for every read."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """The size, as pyarrow requires."""
        return self._file.size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        last = self._file.size if size is None or size < 0 else min(self._at + size, self._file.size)
        pieces = [self._range(first, min(first + _PIECE_BYTES, last)) for first in range(self._at, last, _PIECE_BYTES)]
        self._at = max(self._at, last)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _range(self, first: int, last: int) -> bytes:
        file = self._file
        content: bytes = ask_remote(
            file.path, file.where, lambda system, path: system.cat_file(path, start=first, end=last)
        )
        if len(content) != last - first:
            raise DataError(
                f"{file.path}: bytes {first} to {last}: received {len(content)}; it has changed since it was opened"
            )
        return content
