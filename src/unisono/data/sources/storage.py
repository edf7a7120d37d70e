"""Files wherever they lie: local paths, and any URL that fsspec knows.

A local file is a memory map that holds no file handle. A remote one is read by ranges, each without a state that
threads or forked processes could share, in pieces that have a deadline: a server that goes away is an error and never
a hang.
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
_PIECE_BYTES = 8 << 20  # bytes asked for at a time, so that the deadline is one of progress
_READ_AHEAD = 1 << 20  # bytes that a remote file reads ahead
_RATIO, _FREE = 200, 64 << 20  # gzip may unpack a byte to so many, and so many bytes whatever they come from
_ROWS_PER_BYTE = 4096  # of a file; a format that repeats one value in a few bytes has fewer in whatever is no attack


TAG = "CACHEDIR.TAG"  # https://bford.info/cachedir


def derived(folder: Path) -> None:
    """Make a directory of what can be made again, marked so that a search for data passes over it."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / TAG).is_file():
        (folder / TAG).write_text("Signature: 8a477f597d28d172789f06886806bc55\n# made by unisono\n", encoding="ascii")


@dataclass(frozen=True)
class RemoteOptions:
    """How remote places are reached.

    Attributes:
        options: for the file system, e.g. `endpoint_url`, as pairs.
        deadline: seconds that one answer may take.
    """

    options: Options = ()
    deadline: float = DEADLINE


@dataclass(frozen=True)
class File:
    """A file of rows, as it was found.

    Attributes:
        path: local path or URL.
        format: `arrow`, `parquet`, `jsonl`, `text` or `npy`.
        name: as it stands in the order and in the fingerprint, relative to where it was found.
        size: bytes.
        stamp: of its last change: time, or what the object store says of its content.
        where: how to reach it.
    """

    path: str
    format: str
    name: str
    size: int
    stamp: str
    where: RemoteOptions = RemoteOptions()

    @classmethod
    def of(cls, path: Path, format: str, name: str, where: RemoteOptions | None = None) -> File:
        """A local file, as it is now."""
        status = path.stat()
        return cls(str(path), format, name, status.st_size, str(status.st_mtime_ns), where or RemoteOptions())

    @property
    def compressed(self) -> bool:
        """Whether it is to be unpacked by gzip."""
        return self.path.lower().endswith(".gz")

    def open(self) -> Any:
        """A `pyarrow.NativeFile`: a memory map, or ranges of a remote file. To be closed."""
        self.check()
        if is_remote(self.path):
            return pa.PythonFile(_RemoteFile(self), mode="r")
        return pa.memory_map(self.path) if self.size else pa.BufferReader(b"")

    def content(self) -> Any:
        """All of it as a buffer, (size,) bytes: mapped where it is local, and then without a file handle."""
        with self.open() as source:
            return source.read_buffer()

    def stream(self) -> io.BufferedReader:
        """Its bytes one after the other, in bounded memory. To be closed."""
        self.check()
        if is_remote(self.path):
            return io.BufferedReader(_RemoteFile(self), buffer_size=_READ_AHEAD)
        return Path(self.path).open("rb")

    @contextmanager
    def unpacked(self) -> Iterator[io.BufferedReader]:
        """Its bytes one after the other, unpacked where they are packed; more than gzip makes of text is an error."""
        with self.stream() as raw:
            if self.compressed:
                with gzip.open(raw) as plain:
                    yield io.BufferedReader(_Unpacked(self, plain), buffer_size=_READ_AHEAD)
            else:
                yield raw

    def check_rows(self, rows: int) -> None:
        """Refuse a number of rows that no file of this size can hold, before memory is asked for them.

        Raises:
            DataError: naming the file.
        """
        if not 0 <= rows <= _ROWS_PER_BYTE * self.size:
            raise DataError(
                f"{self.path} cannot be read as {self.format}: it says that it has {rows} rows, which {self.size} "
                "bytes cannot hold; it is damaged or forged, so write or copy it again"
            )

    def range(self, first: int, last: int) -> bytes:
        """Bytes `first..last-1`."""
        with self.open() as source:
            source.seek(first)
            return bytes(source.read(last - first))

    def now(self) -> File:
        """The same file as it is now; a remote one is held to its size as it is read."""
        return self if is_remote(self.path) else File.of(Path(self.path), self.format, self.name, self.where)

    def check(self) -> None:
        """Refuse a local file that is another one than was found."""
        if (now := self.now()) != self:
            raise self.changed_error(now)

    def changed_error(self, now: File) -> DataError:
        """The error of a file that is another one now than was found."""
        size = f": it had {self.size} bytes and has {now.size}" if now.size != self.size else ""
        return DataError(
            f"{self.path} has changed since it was opened{size}; restore it, or start a new run with "
            "the data as they are now"
        )


@contextmanager
def wrap_read_errors(file: File) -> Iterator[None]:
    """What goes wrong below is an error that names the file."""
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
    """What an error says; some of those of networks say nothing but their name."""
    return str(error) or type(error).__name__


def is_remote(path: str) -> bool:
    """Whether it is a URL of something else than local files."""
    return "://" in path


def open_filesystem(url: str, where: RemoteOptions) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    fsspec keeps one for each process and thread, so this is cheap and safe after a fork.

    Raises:
        DataError: for a protocol that nobody knows, or whose package is not installed.
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
    """What a remote file system answers, within the deadline.

    The thread of an answer that never comes is left behind; it is a daemon, so it holds up no exit. An error says what
    cannot be `done`.

    Raises:
        DataError: naming the URL, for an answer that is an error or does not come in time.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask(*open_filesystem(url, where)))
        except BaseException as error:  # of another thread: handed over, whatever it is
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
    """Options of a file system, in a form that can be part of a frozen object."""
    return tuple(sorted((given or {}).items()))


class _Unpacked(io.RawIOBase):
    """What gzip makes of a file, up to a bound."""

    def __init__(self, file: File, plain: gzip.GzipFile) -> None:
        self._file, self._plain, self._left = file, plain, max(_FREE, _RATIO * file.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._plain.read1(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise DataError(
                f"{self._file.path} unpacks to more than {_RATIO} times its {self._file.size} bytes, as no text does; "
                "if it is meant to, unpack it yourself"
            )
        buffer[: len(content)] = content
        return len(content)


class _RemoteFile(io.RawIOBase):
    """A remote file as Python's raw file: a position, and a request for every read."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """What pyarrow asks for."""
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
                f"{file.path}: bytes {first} to {last} came as {len(content)}; it has changed since it was opened"
            )
        return content
