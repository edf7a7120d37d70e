"""References to recordings (bytes, a path, a URL, or a byte range of one), and windows within them."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, BinaryIO

import numpy as np

from unisono_audio.shared import ConfigError, DataError, RemoteOptions, is_remote, read_remote, remote_size

_MAPPED = 4 << 20  # larger files are memory-mapped, so that reading windows and headers is cheap


class BadRecording(Exception):  # noqa: N818 - the end of a sentence that begins with a recording's name
    """Why a recording cannot be used."""


@dataclass(frozen=True)
class ByteRange:
    """A recording within a larger file, e.g. a member of a tar archive in an object store.

    Attributes:
        url: of the file: a path, or a URL that fsspec supports.
        first: its first byte.
        last: one past its last byte; -1 for the end of a URL.
        where: options of the file system of a URL, and how long it may take to answer.
    """

    url: str
    first: int
    last: int
    where: RemoteOptions = field(default_factory=RemoteOptions)

    def __str__(self) -> str:
        return self.url if self.last < 0 else f"{self.url} (bytes {self.first} to {self.last})"


Recording = bytes | bytearray | memoryview | str | PathLike[str] | ByteRange
"""The bytes of a file, a path or URL, or a `ByteRange`; any buffer (e.g. a `pyarrow.Buffer`) is accepted as bytes."""


@dataclass(frozen=True)
class Window:
    """A part of a recording, given by its start in seconds or by its relative position.

    Attributes:
        start: in seconds; None to use `place`.
        place: 0 for the first window that fits, 1 for the last; a recording shorter than the window is used whole.
    """

    start: float | None = 0.0
    place: float = 0.0

    def __post_init__(self) -> None:
        if self.start is not None and not 0 <= self.start < 1e9:
            raise ConfigError(f"a window cannot begin at {self.start} s")
        if not 0 <= self.place <= 1:
            raise ConfigError(f"a window's place is from 0 to 1, not {self.place}")

    @classmethod
    def random(cls, rng: np.random.Generator) -> Window:
        """A window at a uniformly random position."""
        return cls(None, float(rng.random()))

    def bounds(self, frames: int | None, wanted: int | None, rate: int) -> int:
        """The window's first frame in a recording of `frames` frames (None if unknown); `wanted` is its length."""
        if self.start is not None:
            return int(np.floor(self.start * rate + 0.5))
        if frames is None or wanted is None or frames <= wanted:
            return 0
        room = frames - wanted
        return min(room, int(self.place * (room + 1)))


FIRST = Window()
"""The window at the beginning of a recording."""
CENTRE = Window(None, 0.5)
"""The window in the middle of a recording."""


def windows(frames: int, rate: int, duration: float, hop: float | None = None) -> list[Window]:
    """All windows of a recording, for evaluation: one every `hop` seconds; the last one may be shorter.

    Args:
        frames: of the recording.
        rate: in Hz.
        duration: of a window in seconds.
        hop: distance between windows in seconds; None for `duration`, i.e. without gaps or overlap.
    """
    hop = duration if hop is None else hop
    if duration <= 0 or hop <= 0:
        raise ConfigError(f"windows of {duration} s every {hop} s cannot be cut")
    length = frames / rate
    count = 1 if length <= duration else 1 + int(np.ceil((length - duration) / hop - 1e-9))
    return [Window(number * hop) for number in range(count) if number * hop * rate < frames]


def name_of(recording: Any) -> str:
    """The name of a recording, for errors."""
    if isinstance(recording, str | PathLike):
        return fspath(recording)
    return str(recording) if isinstance(recording, ByteRange) else "the recording"


def content(recording: Any) -> Any:
    """The bytes of a recording, or the path of a local file, which the decoder reads itself.

    Raises:
        DataError: if it cannot be read.
    """
    if isinstance(recording, PathLike):
        recording = fspath(recording)
    if isinstance(recording, str):
        recording = recording.removeprefix("file://")
        if is_remote(recording):
            recording = ByteRange(recording, 0, -1)
    return _range(recording) if isinstance(recording, ByteRange) else recording


def data_of(recording: Any) -> memoryview:
    """The bytes of a recording, read if necessary."""
    given = content(recording)
    if isinstance(given, str):
        try:
            with _open(given) as file:
                if os.fstat(file.fileno()).st_size < _MAPPED:
                    return memoryview(file.read())
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise DataError(f"{given} cannot be opened: {error.strerror or error}") from error
    return memoryview(given).cast("B")


def _open(path: str) -> BinaryIO:
    """A regular file; a pipe, on which a reader would wait for ever, is refused at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return os.fdopen(descriptor, "rb")


def _range(part: ByteRange) -> bytes:
    try:
        if is_remote(part.url):
            last = remote_size(part.url, part.where) if part.last < 0 else part.last
            return read_remote(part.url, part.first, last, part.where)
        with _open(part.url) as file:
            file.seek(part.first)
            return file.read(part.last - part.first)
    except OSError as error:
        raise DataError(f"{part.url} cannot be read: {error.strerror or error or 'it does not exist'}") from error
