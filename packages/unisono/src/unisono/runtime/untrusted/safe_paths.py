"""Opens files named by untrusted input: inside their folder, regular files only, no links, and never blocking.

A manifest, an index or a folder of assets may come from anybody. A name in it may climb out of its folder, be a link to
a private key, or a pipe on which a reader would wait forever. So a name is walked one component at a time, each opened
relative to the previous one without following links; the checks apply to the open descriptor, which nobody can swap
between check and use. The folder itself is the caller's choice and may be reached by links.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from contextlib import ExitStack, suppress
from io import BufferedReader, FileIO, TextIOWrapper
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from unisono.runtime.errors import DataError, UnisonoError, find_duplicates, format_examples
from unisono.runtime.text import one_line

TEXT = 64 << 20  # default limit for text and JSON files, in bytes
WHOLE = 2 << 30  # default limit for other files that are read whole, in bytes
LINE = 256 << 20  # limit for a line of text, in characters
WILDCARDS = "*?["  # of a glob
_MAX_NAME = 1024  # characters of a name
_MAX_DEPTH = 16  # components of a name
_MAX_COMPONENT = 255  # bytes of a component, on all common file systems
_INVALID = re.compile(r"[\0\\\ud800-\udfff]")  # separators of Windows, and what no name of a file holds
# Neither `true` nor `1e-05` leads beyond a float. A pattern with one first letter is found far faster than with two.
_SMALL_E, _LARGE_E = re.compile("e[+0-9]"), re.compile("E[+0-9]")  # two, each of which searches for one letter
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # O_NONBLOCK: a pipe nobody writes to opens at once
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY


class UnsafePathError(UnisonoError, OSError):
    """A path that leads elsewhere, or not to a regular file. It was not read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.strerror = text


def open_inside(folder: Path | str, name: object, *, follow: bool = False) -> BufferedReader:
    """Open a file that an index, a manifest or a directory listing names.

    Links are refused, except in a snapshot of the Hugging Face cache, where a link to a blob of the same cache is
    followed.

    Args:
        folder: The folder that the name is relative to; chosen by the caller, and may be reached by links.
        name: The untrusted name, with `/` between its components.
        follow: Whether to follow links that stay in the folder, as folders of data may have them.

    Raises:
        UnsafePathError: If the name is absolute, contains `..`, goes through a link, or is not a regular file.
        OSError: If the file is missing or may not be read.
    """
    return _open_parts(folder, components(folder, name), follow)


def open_found(path: Path | str, folder: Path | str | None) -> BufferedReader:
    """Open a file that was found below a folder of data, where links may lead to what is in that folder.

    Args:
        path: Of the file, which begins with `folder`.
        folder: In which it was found; None if the user named the file itself, as for `open_regular`.

    Raises:
        UnsafePathError: As for `open_inside`.
        OSError: If it is missing or may not be read.
    """
    if folder is None:
        return open_regular(path)
    return _open_parts(folder, list(Path(path).relative_to(folder).parts), follow=True)


def open_regular(path: Path | str) -> BufferedReader:
    """Open a file that the user named, possibly through a link; pipes, devices and folders are refused at once.

    A file of which only its folder was named is opened by `open_found` or `open_inside`.

    Raises:
        UnsafePathError: If it is not a regular file.
        OSError: If it is missing or may not be read.
    """
    return _open_checked(os.open(path, _OPEN), str(path))


class Text(TextIOWrapper):
    """An open file as text whose lines have a limit: one of gigabytes, as of a file full of holes, is not read.

    Args:
        file: As bytes.
        shown: What it is called in errors.
        encoding: As for `io.TextIOWrapper`.
        newline: As for `io.TextIOWrapper`.
    """

    def __init__(self, file: BufferedReader, shown: Path | str, encoding: str, newline: str | None) -> None:
        super().__init__(file, encoding=encoding, newline=newline)
        self._shown = shown

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        """Read a line.

        Raises:
            DataError: If it is too long.
        """
        line = super().readline(LINE + 1 if size < 0 else size)
        if len(line) > LINE:
            raise DataError(
                f"{self._shown} has a line of more than {LINE >> 20} million characters; check that it was written "
                "completely, with a line for each row"
            )
        return line

    def __next__(self) -> str:  # type: ignore[override]
        if line := self.readline():
            return line
        raise StopIteration


def open_text(path: Path | str, encoding: str = "utf-8", newline: str | None = None) -> Text:
    """Open a file with `open_regular`, as text."""
    return Text(open_regular(path), path, encoding, newline)


def read_regular(path: Path | str, limit: int = WHOLE) -> bytes:
    """Read a file opened with `open_regular`; one of more than `limit` bytes is refused unread."""
    with open_regular(path) as file:
        return read_limited(file, str(path), limit)


def load_array(folder: Path | str, name: object, *, mapped: bool = False, follow: bool = False) -> Any:
    """Read an array of NumPy's format from a file opened with `open_inside`.

    Args:
        folder: As for `open_inside`.
        name: As for `open_inside`.
        mapped: Whether to map it into memory, read-only, instead of reading it.
        follow: As for `open_inside`.

    Raises:
        ValueError: If it is not such a file, is smaller than its header says, or holds Python objects.
    """
    import numpy as np

    with open_inside(folder, name, follow=follow) as file:
        found = np.load(
            path_of(file), mmap_mode="r", allow_pickle=False
        )  # which allocates nothing for a shape that lies
    if not isinstance(found, np.ndarray):
        raise ValueError("it is not an array of NumPy's format (.npy)")
    if not mapped:
        return np.array(found)
    # Workers map it again by its file's own name.
    vars(found)["filename"] = str(Path(folder, str(name)).resolve())
    return found


def read_bytes(folder: Path | str, name: object, limit: int = TEXT) -> bytes:
    """Read a file opened with `open_inside`; a file of more than `limit` bytes is refused unread."""
    with open_inside(folder, name) as file:
        return read_limited(file, f"{folder}/{one_line(name)}", limit)


def read_text(folder: Path | str, name: object, limit: int = TEXT) -> str:
    """Read a file as UTF-8 text; a UnicodeDecodeError (a ValueError) if it is not UTF-8."""
    return read_bytes(folder, name, limit).decode("utf-8")


def read_json(folder: Path | str, name: object, shape: Any, limit: int = TEXT) -> Any:
    """Read a record from a file as JSON.

    Args:
        folder: As for `open_inside`.
        name: As for `open_inside`.
        shape: As for `parse_json`.
        limit: As for `read_bytes`.

    Raises:
        ValueError: If it is invalid, nested too deeply, or does not have that shape.
    """
    return parse_json(read_bytes(folder, name, limit), shape)


def parse_json(content: bytes | str, shape: Any) -> Any:
    """Parse untrusted JSON, and check its shape, so that nobody has to guard against a missing key or another type.

    Args:
        content: The text.
        shape: A type as of `runtime.shapes`: a `TypedDict` of what is used, or `shapes.Object` where any keys may be.

    Raises:
        ValueError: As for `decode_json`, and for another shape, naming the place.
    """
    try:
        value = decode_json(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    from unisono.runtime.untrusted import shapes

    if (wrong := shapes.misfit(value, shape)) is not None:
        raise ValueError(one_line(wrong))
    return value


def decode_json(content: bytes | str) -> Any:
    """Parse JSON that means the same to every reader: no key twice in an object, no number beyond a float's range.

    Python's parser takes the last of two values and makes infinity of `1e400`. `NaN` and `Infinity` stay what they are,
    and so may infinity written with 309 digits before a point.

    Raises:
        ValueError: For these, and for anything else that makes Python's parser fail.
        RecursionError: If it is nested too deeply.
    """
    if isinstance(content, bytes):
        content = content.decode(json.detect_encoding(content), "surrogatepass")
    if content.startswith("\ufeff"):  # as `json.loads`, which builds a decoder for every call
        raise ValueError("it begins with a byte order mark")
    # A hook for floats makes numbers half as slow again, so it is only for text that may have what it looks for.
    decoder = _FINITE_DECODER if _SMALL_E.search(content) or _LARGE_E.search(content) else _DECODER
    text = content.strip(" \t\n\r")
    try:
        value, end = decoder.raw_decode(text)  # `decode` takes twice as long for a short line: two regular expressions
        if end == len(text):
            return value
    except ValueError:
        pass  # `decode` raises it again, with the place in the whole content
    return decoder.decode(content)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"it has the key {format_examples(find_duplicates([key for key, _ in pairs]))} twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if number - number:  # NaN of infinity, and true
        raise ValueError(f"the number {one_line(text, 40)} is too large for 64 bits")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)
_FINITE_DECODER = json.JSONDecoder(object_pairs_hook=_object_of, parse_float=_finite)


def copy_inside(folder: Path | str, name: object, target: Path, limit: int | None = None) -> None:
    """Copy a file opened with `open_inside` to a new file; it is an error if that exists. Half a copy is removed.

    Args:
        folder: As for `open_inside`.
        name: As for `open_inside`.
        target: The new file.
        limit: Bytes above which it is refused, as one of gigabytes that is full of holes; None if there is no limit.
    """
    with open_inside(folder, name) as source:
        if limit is not None and (size := os.fstat(source.fileno()).st_size) > limit:
            raise UnsafePathError(f"{folder}/{one_line(name)} has {size} bytes; at most {limit} are copied")
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as made:
                while part := source.read(1 << 20):
                    made.write(part)
        except OSError:
            target.unlink(missing_ok=True)
            raise


def is_inside(folder: Path | str, name: object) -> bool:
    """Whether `open_inside` would open a file; False if it is missing or refused."""
    try:
        open_inside(folder, name).close()
    except OSError:
        return False
    return True


def check_link(folder: Path | str, name: PurePath | str) -> None:
    """Refuse what was found in a folder of data if it is a link, unless it leads to what is inside of that folder.

    Raises:
        DataError: Naming the link, and the way out.
    """
    path = Path(folder, name)
    if not path.is_symlink():
        return
    root = Path(folder).resolve()
    target = path.resolve()
    if not path.exists():
        raise DataError(f"{path} is a link to {one_line(path.readlink())}, which does not exist; repair or remove it")
    if not target.is_relative_to(root) and not is_inside(folder, str(name)):  # as in a snapshot of Hugging Face
        raise DataError(
            f"{path} is a link to {one_line(target)}, outside of the folder. Such links are not followed, since a "
            "folder from somebody else could name your private files; name that file itself, or copy it into the folder"
        )


def check_way(folder: Path, path: Path) -> None:
    """Refuse a link on the way from a folder to what was found below it, as by `check_link`."""
    inner = path.relative_to(folder)
    for part in (*reversed(inner.parents), inner):
        check_link(folder, part)


def named_folder(pattern: str) -> Path:
    """Return the folder that a glob names: all before its first wildcard."""
    return Path(*takewhile(lambda part: not any(sign in part for sign in WILDCARDS), Path(pattern).parts))


def path_of(file: BufferedReader) -> str:
    """Return a path that leads to an open file, whatever becomes of its name, for libraries that accept only paths."""
    return f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else f"/dev/fd/{file.fileno()}"


def components(folder: Path | str, name: object) -> list[str]:
    """Split a name that stays below its folder into components.

    Raises:
        UnsafePathError: If it is invalid or leads outside.
    """
    beginning = f"{folder} names the file '{one_line(name)}'"
    text = name if isinstance(name, str) and len(name) <= _MAX_NAME and not _INVALID.search(name) else ""
    if text.startswith("/") or ".." in text.split("/"):
        raise UnsafePathError(f"{beginning}, which lies outside; only files inside that folder are read")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not 0 < len(parts) <= _MAX_DEPTH or any(len(os.fsencode(part)) > _MAX_COMPONENT for part in parts):
        raise UnsafePathError(f"{beginning}, which is not a valid file name; do not trust this folder")
    return parts


def read_limited(file: BufferedReader, shown: str, limit: int) -> bytes:
    """Read an open file, which may grow meanwhile; one larger than `limit` is refused."""
    size = os.fstat(file.fileno()).st_size
    content = file.read(size + 1) if size <= limit else b""  # not `limit`, for which Python would reserve memory
    while size < len(content) <= limit and (more := file.read(1 << 20)):
        content += more
    if size > limit or len(content) > limit:
        raise UnsafePathError(
            f"{shown} has {max(size, len(content))} bytes; at most {limit} bytes of such a file are read"
        )
    return content


def _open_parts(folder: Path | str, parts: list[str], follow: bool) -> BufferedReader:
    try:
        return _walk(folder, parts)
    except UnsafePathError:
        if not follow:
            raise
        with suppress(OSError, RuntimeError, ValueError):  # walked again without links, whoever changes it now
            root = Path(folder).resolve()
            if inside := list(root.joinpath(*parts).resolve().relative_to(root).parts):
                parts = inside
        return _walk(folder, parts)


def _walk(folder: Path | str, parts: list[str]) -> BufferedReader:
    """Open a file below a folder, component by component, through no link but that of a Hugging Face snapshot."""
    with ExitStack() as opened:
        at = _open_folder(folder, opened)
        for number, part in enumerate(parts[:-1], start=1):
            at = _descend(at, part, f"{folder}/{one_line('/'.join(parts[:number]))}", opened)
        shown = f"{folder}/{one_line('/'.join(parts))}"
        try:
            descriptor = os.open(parts[-1], _OPEN | os.O_NOFOLLOW, dir_fd=at)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EMLINK):
                raise _with_full_path(error, shown) from error
            found = _hf_blob(Path(folder), parts, at)
            if found is None:
                target = ""
                with suppress(OSError):
                    target = f" to {one_line(os.readlink(parts[-1], dir_fd=at))}"
                raise UnsafePathError(
                    f"{shown} is a link{target}; only files inside that folder are read, so copy the file there"
                ) from error
            return open_inside(*found)
        return _open_checked(descriptor, shown)


def _open_folder(folder: Path | str, opened: ExitStack) -> int:
    descriptor = os.open(folder, _FOLDER)
    opened.callback(os.close, descriptor)
    return descriptor


def _descend(at: int, part: str, shown: str, opened: ExitStack) -> int:
    try:
        descriptor = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if _is_link(at, part):
            raise UnsafePathError(f"{shown} is a link; only files inside that folder are read") from error
        raise _with_full_path(error, shown) from error
    opened.callback(os.close, descriptor)
    return descriptor


def _is_link(at: int, part: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(part, dir_fd=at, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _open_checked(descriptor: int, shown: str) -> BufferedReader:
    """Return an open regular file as a file object; close and refuse anything else."""
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise UnsafePathError(f"{shown} is {describe_kind(mode)}, not a file; it was not read")
        os.set_blocking(descriptor, True)
        return BufferedReader(FileIO(descriptor))  # what os.fdopen makes, which asks the system once more
    except BaseException:
        os.close(descriptor)
        raise


def _hf_blob(folder: Path, parts: list[str], at: int) -> tuple[Path, str] | None:
    """Return the cache of a repository, and the blob in it, that a link in a Hugging Face snapshot leads to."""
    snapshot = next((path for path in (folder, *folder.parents) if path.parent.name == "snapshots"), None)
    if snapshot is None:
        return None
    depth = len(folder.relative_to(snapshot).parts) + len(parts) + 1
    with suppress(OSError):
        target = os.readlink(parts[-1], dir_fd=at).split("/")
        up, rest = target[:depth], target[depth:]
        if set(up) == {".."} and len(rest) == 2 and rest[0] == "blobs" and rest[1] not in ("", ".", ".."):
            return snapshot.parent.parent, "/".join(rest)
    return None


def _with_full_path(error: OSError, shown: str) -> OSError:
    """Return the same error with the whole path, where the system reports only a part of it."""
    return type(error)(error.errno, error.strerror, shown)


def describe_kind(mode: int) -> str:
    """What a file of this mode is, in words."""
    kinds = (
        (stat.S_ISLNK, "a link"), (stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
    )  # fmt: skip
    return next((name for is_kind, name in kinds if is_kind(mode)), "something else")
