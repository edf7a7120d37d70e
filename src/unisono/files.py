"""Small files that are there whole or not at all, and where what can be made again is kept."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".writing"  # how the names of files end that are not whole yet


@contextlib.contextmanager
def whole(path: Path, *, lasting: bool = False) -> Iterator[Path]:
    """A path to write to; what is there in the end becomes the file in one rename, and nothing after an error.

    Args:
        path: of the file, which is there as it was before until then.
        lasting: it is there even if the power fails right after.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
    try:
        yield temporary
        sync(temporary)  # or the rename could outlive the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if lasting:
        sync(path.parent)


def write_whole(path: Path, text: str, *, lasting: bool = False) -> None:
    """Write a text file that is there whole, or as it was before; `lasting` as above."""
    with whole(path, lasting=lasting) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Have a file's content, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Where what can be made again is kept for this user: `$UNISONO_CACHE`, else `~/.cache/unisono`."""
    return Path(os.environ.get("UNISONO_CACHE", Path.home() / ".cache" / "unisono"))
