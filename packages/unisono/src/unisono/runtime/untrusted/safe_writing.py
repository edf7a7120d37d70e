"""Writes into folders in which others may have put links, pipes or files of the same name.

Nothing is written through a link, and nothing that exists is replaced. What is read for it comes by `safe_paths`.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

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
            if not (stat.S_ISREG(mode) if last else stat.S_ISDIR(mode)):
                raise UnsafePathError(
                    f"{path} is {describe_kind(mode)}, and nothing is written through it; move it away"
                )
    return path
