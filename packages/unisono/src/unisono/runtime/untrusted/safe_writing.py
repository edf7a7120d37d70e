"""Writes into folders in which others may have put links, pipes or files of the same name.

Nothing is written through a link or into a pipe. What is read for it comes by `safe_paths`. The folder of a run is such
a folder: it may be a copy of somebody else's, in which `logs/rank-00000.log` leads to a file of the user's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import TextIO

from unisono.runtime.untrusted.safe_paths import (
    UnsafePathError,
    components,
    copy_inside,
    describe_kind,
    open_inside,
    path_of,
)


def create_inside(folder: Path | str, name: str) -> None:
    """Create an empty file in a folder, in which others may have put a link of that name.

    Raises:
        FileExistsError: If there is a regular file of that name.
        UnsafePathError: If there is anything else.
    """
    path = Path(folder, name)
    try:  # which follows no link of that name
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise UnsafePathError(f"{path} is {describe_kind(mode)}; remove it") from None
        raise


def make_folder(folder: Path, name: str) -> Path:
    """Create a folder in another one, which must exist, unless it is there; returns it.

    Raises:
        UnsafePathError: If a link, or something else, has its name.
    """
    path = folder / name
    with suppress(FileExistsError):
        path.mkdir()
    _refuse(path, path.lstat().st_mode, stat.S_ISDIR)
    return path


def open_to_append(folder: Path, name: str) -> TextIO:
    """Open a file in a folder, to write text at its end; it is created if it is missing, and so are its parents.

    Raises:
        UnsafePathError: If it, or a parent in the folder, is a link or something else.
    """
    return os.fdopen(_open_to_write(folder, name, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8")


def open_to_change(folder: Path, name: str) -> BufferedRandom:
    """Open a file in a folder, to read and write bytes; as for `open_to_append`."""
    return BufferedRandom(FileIO(_open_to_write(folder, name, os.O_RDWR), "r+"))


def open_anew(folder: Path, name: str) -> FileIO:
    """Open a file in a folder, to write bytes, and empty it; as for `open_to_append`."""
    file = FileIO(_open_to_write(folder, name, os.O_WRONLY), "w")
    file.truncate(0)  # now that it is known to be a file of its own
    return file


def check_contents(folder: Path) -> None:
    """Refuse a folder that holds anything but regular files and folders, before others write files into it by name.

    Raises:
        UnsafePathError: Naming the first.
    """
    for path in sorted(folder.rglob("*")):
        _refuse(path, path.lstat().st_mode, lambda mode: stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _open_to_write(folder: Path, name: str, flags: int) -> int:
    path = destination(folder, name)
    try:
        flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:  # a link or a pipe, since `destination` has looked
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            _refuse(path, path.lstat().st_mode, stat.S_ISREG)
        raise
    try:
        _refuse(path, os.fstat(descriptor).st_mode, stat.S_ISREG)
    except UnsafePathError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse(path: Path, mode: int, unless: Callable[[int], bool]) -> None:
    if not unless(mode):
        raise UnsafePathError(f"{path} is {describe_kind(mode)}, and nothing is written through it; move it away")


def link_inside(folder: Path | str, name: object, target: Path) -> None:
    """Give a file opened with `open_inside` a second name, which must not exist; copy it where that is impossible."""
    with open_inside(folder, name) as source:
        try:
            # With a descriptor, which an absolute path ignores, Python follows the link that the path is.
            os.link(path_of(source), target, src_dir_fd=source.fileno(), follow_symlinks=True)
            return
        except FileExistsError:
            raise
        except OSError:  # another file system, one without hard links, or a file of another user
            pass
    copy_inside(folder, name, target)


def copy_folder(folder: Path | str, target: Path) -> None:
    """Copy the files of a folder, without its subfolders, to a new folder; anything but a regular file is refused."""
    target.mkdir(parents=True)
    for name in sorted(os.listdir(folder)):  # noqa: PTH208 - names, not paths
        if not stat.S_ISDIR(os.lstat(Path(folder, name)).st_mode):
            copy_inside(folder, name, target / name)


def destination(folder: Path, name: object) -> Path:
    """Return where to write a file that an untrusted list names; parents are created, links on the way are refused.

    Raises:
        UnsafePathError: If the name leads elsewhere, or something other than a folder or file is in the way.
    """
    parts = components(folder, name)
    path = folder
    for number, part in enumerate(parts, start=1):
        path = path / part
        last = number == len(parts)
        if not last:
            with suppress(FileExistsError):
                path.mkdir()
        if os.path.lexists(path):
            mode = os.lstat(path).st_mode
            _refuse(path, mode, stat.S_ISREG if last else stat.S_ISDIR)
    return path
