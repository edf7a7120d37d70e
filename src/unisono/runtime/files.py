"""Files that are there whole or not at all, and where what can be made again is kept."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from unisono.runtime.errors import RecordError

TEMPORARY = ".writing"  # how the names of files end that are not whole yet
PICKLES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"})


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


@contextlib.contextmanager
def recording(path: Path) -> Iterator[None]:
    """Tell of a record of the run that cannot be written as of a checkpoint that cannot.

    Raises:
        RecordError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written ({error.strerror or error}). Make room, or have the disk repaired; the same "
            "command goes on from the newest checkpoint"
        ) from error


def write_kept(path: Path, text: str) -> None:
    """Write a text file whole; what stood there is kept beside it as `name.0001.end`, …, if it was another."""
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before is not None and before != text:
        earlier = path.parent.glob(f"{path.stem}.*{path.suffix}")
        kept = {int(number): old for old in earlier if (number := old.suffixes[-2][1:]).isdigit()}
        newest = max(kept, default=0)
        if not newest or kept[newest].read_text(encoding="utf-8") != before:  # else another process has kept it
            write_whole(path.with_suffix(f".{newest + 1:04d}{path.suffix}"), before)
    write_whole(path, text)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into; it gets its name by one rename in the end, and is gone after an error.

    Args:
        path: of the folder, which must not be there.

    Raises:
        FileExistsError: where something is there, before or by the time of the rename. It stays as it is.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "is there already", str(path))
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            sync(written)
        temporary.rename(path)  # which a folder with something in it refuses, and so does a file
        sync(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "is there already", str(path)) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it; of a link the link alone, as what it leads to is not ours.

    Raises:
        OSError: where it cannot be removed, or not all of it.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def of_pickles(path: Path) -> str:
    """The end of an error about a file or folder that could be a pickle: why it is not read, and what reads it."""
    found = path
    if path.is_dir():
        found = next((p for p in sorted(path.iterdir()) if p.suffix in PICKLES), path)
    if found.suffix not in PICKLES:
        return ""
    out = "DIR" if path.is_dir() else f"{path.stem}.safetensors"
    return (
        f". {found.name} is a pickle by its name, and reading one can run code: `unisono import {path} out={out}` "
        "takes the tensors out of it, in a process of its own that runs nothing"
    )


def file_hash(path: Path) -> str:
    """The SHA-256 of a file in hex; of no file, an empty text."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
