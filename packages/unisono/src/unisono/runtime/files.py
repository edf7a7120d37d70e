"""Files that appear complete or not at all, and the directory for cached results."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import platform
import shlex
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from unisono.runtime.errors import DataError, RecordError, UnavailableError
from unisono.runtime.untrusted import safe_paths

TEMPORARY_SUFFIX = ".writing"  # of files that are still being written
# Errors of a file system that does not answer now. Python itself repeats most calls that a signal interrupted; what is
# left are renames, and file systems that give EINTR for reasons of their own.
UNREACHABLE = frozenset({
    errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN,
    errno.EINTR,
})  # fmt: skip
# Errors that say nothing of a file, which may be whole. Others tell that it is missing, damaged, or something else.
_UNAVAILABLE = UNREACHABLE | {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
PICKLE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"})


@contextlib.contextmanager
def atomic_file(path: Path, *, lasting: bool = False) -> Iterator[Path]:
    """Yield a temporary path that becomes the file by one rename at the end; after an error nothing changes.

    Args:
        path: Of the file. An existing file stays unchanged until the rename.
        lasting: Whether the rename must survive a power failure right after it.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
    try:
        yield temporary
        fsync_path(temporary)  # otherwise the rename could reach the disk before the content
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if lasting:
        fsync_path(path.parent)


def write_whole(path: Path, text: str, *, lasting: bool = False) -> None:
    """Write a text file atomically: readers see the old or the new content. `lasting` is as for `atomic_file`."""
    with atomic_file(path, lasting=lasting) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def wrap_record_errors(path: Path) -> Iterator[None]:
    """Report a run record that cannot be written in the same way as a failed checkpoint.

    Raises:
        RecordError: Instead of an OSError.
    """
    try:
        yield
    except safe_paths.UnsafePathError:  # a link or a pipe in its place, which says what to do
        raise
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written ({error.strerror or error}). Free some space or repair the disk, then give the "
            "same command again: it resumes from the newest checkpoint"
        ) from error


def raise_unavailable(path: Path, error: OSError) -> None:
    """Raise for an error that says nothing of a file itself, so that it is not taken for missing or damaged.

    Raises:
        UnavailableError: Saying so.
    """
    if error.errno in _UNAVAILABLE:
        raise UnavailableError(
            f"{path} cannot be read now ({error.strerror or error}). It may well be whole, and was left as it is: see "
            "to the file system or the permissions, then give the same command again"
        ) from error


def write_with_backup(path: Path, text: str) -> None:
    """Write a text file atomically; different earlier content is kept as `name.0001.end` and so on."""
    before = safe_paths.read_text(path.parent, path.name) if path.is_file() else None
    if before is not None and before != text:
        earlier = path.parent.glob(f"{path.stem}.*{path.suffix}")
        kept = {int(number): old for old in earlier if (number := old.suffixes[-2][1:]).isdecimal()}
        newest = max(kept, default=0)
        known = safe_paths.read_text(path.parent, kept[newest].name) if newest else None
        if known != before:  # else another process has kept it already
            write_whole(path.with_suffix(f".{newest + 1:04d}{path.suffix}"), before)
    write_whole(path, text)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that gets its name by one rename at the end; it is removed after an error.

    Args:
        path: Of the folder, which must not exist.

    Raises:
        FileExistsError: If something exists there, before or by the time of the rename. It is left as it is.
    """
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, "exists already", str(path))
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{TEMPORARY_SUFFIX}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            fsync_path(written)
        temporary.rename(path)  # fails if the target is a file or a folder that is not empty
        fsync_path(path.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, "exists already", str(path)) from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def own_folder(prefix: str, within: Path) -> Path:
    """Create a private folder named after this process; first remove those of processes that have ended.

    A killed process cannot clean up, so the next one does: it removes folders with the same prefix that belong to this
    user and whose process no longer exists on this host.
    """
    numbers = Path("/proc/self/ns/pid")  # containers have their own process numbers
    space = numbers.stat().st_ino if numbers.exists() else 0
    mine = f"{prefix}{platform.node()}-{space}-"
    for path in within.glob(f"{glob.escape(mine)}*"):
        pid = path.name.removeprefix(mine).partition("-")[0]
        with contextlib.suppress(OSError):
            if (
                pid.isdecimal()
                and not path.is_symlink()
                and path.stat().st_uid == os.getuid()
                and not _is_running(int(pid))
            ):
                remove_folder(path)
    return Path(tempfile.mkdtemp(prefix=f"{mine}{os.getpid()}-", dir=within))


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def remove_folder(path: Path) -> None:
    """Remove a folder with everything in it; of a symbolic link only the link, because its target is not ours.

    Raises:
        OSError: If not everything could be removed.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


def pickle_hint(path: Path) -> str:
    """Return the end of an error about a possible pickle: why it is not read, and how to convert it."""
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
    """Return the SHA-256 of a file in hex; empty if there is no such file."""
    if not path.is_file():
        return ""
    with safe_paths.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_all(descriptor: int, content: bytes | memoryview) -> None:
    """Write all of it; the kernel may accept less per call."""
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # file systems that cannot flush a directory, such as some of SMB and FUSE, say so
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            error.filename = str(path)  # which an error of a descriptor does not name
            raise
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Return this user's folder for data that can be recreated: `$UNISONO_CACHE`, else `~/.cache/unisono`.

    Raises:
        DataError: If it belongs to another user, or others can write into it.
    """
    folder = Path(os.environ.get("UNISONO_CACHE", Path.home() / ".cache" / "unisono"))
    check_private(folder)
    return folder


def check_private(path: Path) -> None:
    """Refuse a file or folder of a cache in which another user may have written: what is in it is believed.

    Raises:
        DataError: Naming its owner or its mode, and the commands that make a cache of one's own.
    """
    try:
        status = path.stat()
    except OSError:  # not there yet
        return
    user = getattr(os, "geteuid", lambda: status.st_uid)()
    group = stat.S_IWGRP if not _is_own_group(status.st_gid) else 0
    if status.st_uid not in (user, 0):
        why = f"belongs to another user ({_user_name(status.st_uid)})"
    elif status.st_mode & (stat.S_IWOTH | group):
        why = f"can be written by other users (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise DataError(
        f"{path} {why}, who could have put anything into this cache. Use one of your own: `mkdir -m 700 -p "
        f"~/.cache/unisono-own && export UNISONO_CACHE=~/.cache/unisono-own`; if nobody else has written into this "
        f"one: `chmod -R go-w {shlex.quote(str(path))}`"
    )


def cache_entry(*names: str, cache: Path | None = None) -> Path:
    """Where an entry of a cache lies, whether it exists or not; all folders above it exist.

    The cache, the entry and all in between must belong to this user (or root), and nobody else may write into them,
    since what they hold is believed. Call `make_private` for an entry once it is made.

    Args:
        names: Of folders below the cache, and of the entry.
        cache: None for `$UNISONO_CACHE` or `~/.cache/unisono`.

    Raises:
        DataError: If somebody else could have written it, or if the cache cannot be written.
    """
    path = cache or cache_dir()
    check_private(path)
    for name in names:
        path = path / name
        check_private(path)
    with contextlib.suppress(FileNotFoundError):  # another process is replacing it
        for part in path.rglob("*") if path.is_dir() else ():
            check_private(part)
    try:
        make_cache_folder(path.parent)
    except OSError as error:
        raise DataError(
            f"the cache {cache or cache_dir()} cannot be used ({error.strerror or error}); set data.cache or "
            "$UNISONO_CACHE to another folder"
        ) from error
    return path


def make_private(path: Path) -> None:
    """Take from others the right to write into what this process has made, whatever its umask is."""
    for part in [path, *(path.rglob("*") if path.is_dir() else ())]:
        part.chmod(stat.S_IMODE(part.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def make_cache_folder(path: Path) -> None:
    """Create a folder of a cache, and those above it, into which only this user can write; see `check_private`."""
    if not path.is_dir():
        make_cache_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o755)


def _is_own_group(number: int) -> bool:
    """Whether a group is the one that many systems give each user, whose files it may write by default."""
    try:
        import grp
        import pwd

        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except (ImportError, KeyError):
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user_name(number: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(number).pw_name
    except (ImportError, KeyError):
        return str(number)
