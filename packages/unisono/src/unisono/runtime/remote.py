"""Remote files, by any URL that fsspec supports: the only module that talks to its file systems.

Files are read by stateless range requests, so threads and forked processes share nothing. Every request has a deadline:
a server that disappears is an error, never a hang.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from unisono.runtime.errors import DataError

Options = tuple[tuple[str, Any], ...]
T = TypeVar("T")
DEADLINE = 60.0  # seconds without an answer
PIECE_BYTES = 8 << 20  # bytes per request, so that the deadline bounds the time without progress
_READ_AHEAD = 1 << 20  # bytes that are read ahead of streams


@dataclass(frozen=True)
class RemoteOptions:
    """Options for remote file systems.

    Attributes:
        options: of the file system, e.g. `endpoint_url`, as pairs.
        deadline: timeout of a request in seconds.
    """

    options: Options = ()
    deadline: float = DEADLINE


def remote_options(given: Mapping[str, Any] | None = None, deadline: float = DEADLINE) -> RemoteOptions:
    """Options of a file system, as a configuration gives them, in hashable form."""
    return RemoteOptions(tuple(sorted((given or {}).items())), deadline)


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
            f"pip install {_PACKAGES.get(protocol, 'the package of this protocol')}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{url}: {error}; use s3, gs, az, hf, http, https, file, or another protocol of fsspec"
        ) from error
    return system, path


_PACKAGES = {
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


def error_text(error: BaseException) -> str:
    """The message of an error, or its type if it has none, as some network errors do."""
    return str(error) or type(error).__name__


def open_remote(url: str, where: RemoteOptions, size: int | None = None) -> io.RawIOBase:
    """Open a remote file, which costs no request if its size in bytes is known. The caller closes it.

    Raises:
        DataError: if the server does not answer in time, or does not say the size.
    """
    return _RemoteFile(url, remote_size(url, where) if size is None else size, where)


def stream_remote(url: str, where: RemoteOptions, size: int | None = None) -> io.BufferedReader:
    """Open a remote file for sequential reading, in bounded memory. The caller closes it."""
    return io.BufferedReader(open_remote(url, where, size), buffer_size=_READ_AHEAD)


def remote_size(url: str, where: RemoteOptions) -> int:
    """The size of a remote file in bytes."""
    size: int | None = ask_remote(url, where, lambda system, path: system.info(path)["size"])
    if size is None:
        raise DataError(f"{url}: the server does not say how large it is; copy the file, or use another server")
    return size


def read_remote(url: str, first: int, last: int, where: RemoteOptions) -> bytes:
    """Bytes `first..last-1` of a remote file, in requests of 8 MB.

    Raises:
        DataError: if the server does not answer in time, or with fewer bytes.
    """

    def ask(start: int, end: int) -> bytes:
        content: bytes = ask_remote(url, where, lambda system, path: system.cat_file(path, start=start, end=end))
        if len(content) != end - start:
            raise DataError(
                f"{url}: bytes {start} to {end}: received {len(content)}; it has changed since it was opened"
            )
        return content

    pieces = [ask(start, min(start + PIECE_BYTES, last)) for start in range(first, last, PIECE_BYTES)]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _RemoteFile(io.RawIOBase):
    """A remote file of known size as a Python raw file, with a request for every read."""

    def __init__(self, url: str, size: int, where: RemoteOptions) -> None:
        self._url, self._size, self._where, self._at = url, size, where, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        """The size, as pyarrow requires."""
        return self._size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        last = self._size if size is None or size < 0 else min(self._at + size, self._size)
        content = read_remote(self._url, self._at, last, self._where)
        self._at = max(self._at, last)
        return content

    def readinto(self, buffer: Any) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
