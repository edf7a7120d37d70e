"""Files that appear whole or not at all, and the cache for what can be recomputed."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from unisono.runtime.errors import RecordError

TEMPORARY_SUFFIX = ".writing"  # how the names of files end that are not whole yet
PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"})


@contextlib.contextmanager
def atomic_file(path: Path, *, lasting: bool = False) -> Iterator[Path]:
    """A path to write to; what is there in the end becomes the file in one rename, and nothing after an error.

    Args:
        path: of the file, which is there as it was before until then.
        lasting: it is there even if the power fails right after.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        fsync_path(temporary)  # or the rename could outlive the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if lasting:
        fsync_path(path.parent)


def write_whole(path: Path, text: str, *, lasting: bool = False) -> None:
    """Write a text file that is there whole, or as it was before; `lasting` as above."""
    with atomic_file(path, lasting=lasting) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def wrap_record_errors(path: Path) -> Iterator[None]:
    """Report a record of the run that cannot be written the way a failed checkpoint is reported.

    Raises:
        RecordError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written ({error.strerror or error}). Free some space or repair the disk, then give the "
            "same command again: it resumes from the newest checkpoint"
        ) from error


def write_with_backup(path: Path, text: str) -> None:
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
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write into; it gets its name by one rename in the end, and is gone after an error.

    Args:
        path: of the folder, which must not be there.

    Raises:
        FileExistsError: where something is there, before or by the time of the rename. It stays as it is.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists already", str(path))
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            fsync_path(written)
        temporary.rename(path)  # which a folder with something in it refuses, and so does a file
        fsync_path(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "exists already", str(path)) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def own_folder(prefix: str, within: Path) -> Path:
    """A fresh folder that this user alone may enter, named by its process; those of processes that ended go first.

    A process that is killed removes nothing, so what it has left is found by whoever comes next: folders of the same
    prefix that this user owns and whose process this host no longer has.
    """
    numbers = Path("/proc/self/ns/pid")  # a container has process numbers of its own
    space = numbers.stat().st_ino if numbers.exists() else 0
    mine = f"{prefix}{platform.node()}-{space}-"
    for path in within.glob(f"{glob.escape(mine)}*"):
        pid = path.name.removeprefix(mine).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not path.is_symlink() and path.stat().st_uid == os.getuid() and not _lives(int(pid)):
                remove_folder(path)
    return Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-", dir=within))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it; of a link the link alone, as what it leads to is not ours.

    Raises:
        OSError: where it cannot be removed, or not all of it.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def pickle_hint(path: Path) -> str:
    """The end of an error about a file or folder that could be a pickle: why it is not read, and what reads it."""
    found = path
    if path.is_dir():
        found = next((p for p in sorted(path.iterdir()) if p.suffix in PICKLE_SUFFIXES), path)
    if found.suffix not in PICKLE_SUFFIXES:
        return ""
    out = "DIR" if path.is_dir() else f"{path.stem}.safetensors"
    return (
        f". {found.name} looks like a pickle, and loading one can run code. `unisono import {path} out={out}` "
        "extracts its tensors in a separate process without running any code"
    )


def file_hash(path: Path) -> str:
    """The SHA-256 of a file in hex; of no file, an empty text."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_path(path: Path) -> None:
    """Have a file's content, or a directory's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Where what can be made again is kept for this user: `$UNISONO_CACHE`, else `~/.cache/unisono`."""
    return Path(os.environ.get("UNISONO_CACHE", Path.home() / ".cache" / "unisono"))
