"""The lock of a run's folder: one start at a time may write into it, across hosts that share a file system.

    lease/00000007.json   the owner: host, process, start time; its token is the number, which only ever grows
    lease/00000007.beat   a counter that the owner increments while it lives

A token is claimed by a hard link to a finished file, which fails if another process holds it, also on network file
systems. An owner that has not released its token is dead if its process is gone, where that can be checked; otherwise
if its counter has not moved for some seconds by the challenger's own clock. So neither wall clocks nor file times
matter. An owner that was only suspended finds a newer token and must not write any more. Nor must one whose folder was
deleted, renamed or replaced: its own counter is not there any more (`RunLock.describe_loss`).
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.runtime.console import say
from unisono.runtime.errors import RunError
from unisono.runtime.files import TEMPORARY_SUFFIX, write_whole
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.supervise import identity

FOLDER = "lease"
LOCK_VARIABLE = "UNISONO_LEASE"  # passes the owner's token and folder to its child processes
BEAT_INTERVAL = 3.0  # seconds between heartbeats
TAKEOVER_AFTER = 20.0  # seconds without a heartbeat after which an owner that cannot be checked counts as dead
_LARGEST = 1 << 16  # bytes of a record
_TOKENS_KEPT = 4  # older tokens that are kept
_MAX_DIGITS = 18  # of a token in a file's name


class Owner(identity.Identity):
    """Who holds a lock, or held it."""

    released: bool


@dataclass(frozen=True)
class RunLock:
    """A claim on a run's folder.

    Attributes:
        folder: Of the run.
        token: Larger than any token before.
        seized: Whether the previous owner had not released the lock.
        inode: Device and inode of the counter, which stay the same as long as the folder does; None if not known.
        descriptor: Of the folder, which tells where it went; None if it is not open.
    """

    folder: Path
    token: int
    seized: bool = False
    inode: str | None = None
    descriptor: int | None = None

    @property
    def owner_file(self) -> Path:
        """Names the owner."""
        return self.folder / FOLDER / f"{self.token:08d}.json"

    @property
    def counter_file(self) -> Path:
        """Counts the owner's heartbeats."""
        return self.owner_file.with_suffix(".beat")

    def describe_loss(self) -> str | None:
        """Describe who has taken over the run, or what became of its folder; None while the lock holds."""
        try:
            newest = _newest_token(self.folder)
        except OSError:
            return None  # a file system that does not answer now; the next look will tell
        if newest <= self.token:
            return self._describe_vanished()
        return (
            f"{self.folder} was taken over by {_format_owner(_read_owner(self.folder, newest))}, because this run had "
            "given no sign of life for some time. The other process continues the run; this one writes nothing more"
        )

    def check_held(self) -> None:
        """Refuse to continue if another process has taken over, or the folder has vanished.

        Raises:
            RunError: Naming the new owner, or where the folder went.
        """
        if loss := self.describe_loss():
            raise RunError(loss)

    def _describe_vanished(self) -> str | None:
        try:
            found = _inode(self.counter_file)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # as ESTALE, after a server has failed over
                return None  # the same
            found = ""
        if self.inode is None or found == self.inode:
            return None
        there = ""
        if self.descriptor is not None:
            with suppress(OSError):
                there = str(Path(f"/proc/self/fd/{self.descriptor}").readlink())
        if there.endswith(" (deleted)"):
            what = "was deleted, with its checkpoints, while the run trained in it"
        elif there and there != str(self.folder.resolve()):
            what = f"was renamed to {one_line(there)} while the run trained in it. Rename it back to resume the run"
        else:
            what = f"has lost its lock ({self.counter_file.name}): it was replaced, or somebody emptied it"
        return f"{self.folder} {what}. The run ends here, and writes nothing more"


def inherited_lock(folder: Path) -> RunLock | None:
    """Return the lock on a folder that this process or its launcher holds."""
    token, _, rest = os.environ.get(LOCK_VARIABLE, "").partition(":")
    inode, _, locked = rest.partition(":")
    if locked != str(folder.resolve()):
        return None
    descriptor = os.open(folder, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    lock = RunLock(folder, int(token), inode=inode, descriptor=descriptor)
    weakref.finalize(lock, os.close, descriptor)
    return lock


@contextmanager
def hold_lock(folder: Path, interval: float = BEAT_INTERVAL, patience: float = TAKEOVER_AFTER) -> Iterator[RunLock]:
    """Lock an existing folder, keep the lock alive, and release it at the end.

    Args:
        folder: Of a run.
        interval: Seconds between heartbeats.
        patience: Seconds without a heartbeat after which an owner on another host counts as dead.

    Raises:
        RunError: Naming the owner, if there is a living one.
        OSError: If the folder is not writable.
    """
    lease = _acquire(folder, interval, patience)
    before = os.environ.get(LOCK_VARIABLE)
    os.environ[LOCK_VARIABLE] = f"{lease.token}:{lease.inode}:{folder.resolve()}"
    stop = threading.Event()
    thread = threading.Thread(
        target=_send_heartbeats, args=(lease.counter_file, interval, stop), name="lease", daemon=True
    )
    thread.start()
    try:
        yield lease
    finally:
        stop.set()
        thread.join(interval)
        if before is None:
            os.environ.pop(LOCK_VARIABLE, None)
        else:
            os.environ[LOCK_VARIABLE] = before
        with suppress(OSError):  # the folder, or its disk, may be gone
            if lease.owner_file.is_file():  # otherwise others have taken and released the lock since
                write_whole(lease.owner_file, json.dumps({**identity.own_identity(), "released": True}) + "\n")


def find_holder(folder: Path) -> dict[str, Any] | None:
    """Return the process that holds a run's folder, as far as can be seen without waiting; None if there is none."""
    owner = _last_owner(folder)
    return None if owner is None or owner["released"] or identity.is_alive(owner) is False else owner


def was_released(folder: Path) -> bool:
    """Whether the last process that held a run's folder ended in order; False also if none ever did."""
    owner = _last_owner(folder)
    return owner is not None and bool(owner["released"])


def _last_owner(folder: Path) -> dict[str, Any] | None:
    with suppress(OSError):
        return _read_owner(folder, _newest_token(folder))
    return None


def _acquire(folder: Path, interval: float, patience: float) -> RunLock:
    safe_writing.make_folder(folder, FOLDER)
    while True:
        newest = _newest_token(folder)
        owner = _read_owner(folder, newest)
        if newest and owner is None:
            if _newest_token(folder) != newest:
                continue  # the lock changes hands right now
            owner = {"host": "an unknown host", "machine": "", "pid": 0, "released": False}  # not readable, or not yet
        seized = owner is not None and not owner["released"]
        if owner is not None and seized and _is_owner_alive(folder, newest, owner, patience):
            raise RunError(
                f"{folder} is in use by {_format_owner(owner)}, which is training this run; wait for it, stop it, "
                "or choose another run.name"
            )
        lease = RunLock(folder, newest + 1, seized)
        if len(str(lease.token)) > _MAX_DIGITS:  # no file of that name is seen, so that nobody could ever hold it
            raise RunError(f"{folder / FOLDER} has a file {newest}.json, which no run has written; remove it")
        if _claim_token(lease, interval) and _newest_token(folder) == lease.token:
            _remove_old_tokens(lease)
            return replace(lease, inode=_inode(lease.counter_file))


def _claim_token(lease: RunLock, interval: float) -> bool:
    """Claim a token; False if another process has it."""
    own_file = lease.owner_file.with_suffix(f".json.{os.getpid()}-{threading.get_ident()}{TEMPORARY_SUFFIX}")
    try:
        write_whole(own_file, json.dumps({**identity.own_identity(), "interval": interval, "released": False}) + "\n")
        safe_writing.open_to_append(lease.folder, f"{FOLDER}/{lease.counter_file.name}").close()
        os.link(own_file, lease.owner_file)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        try:  # without hard links, exclusive creation still guarantees one owner
            safe_paths.copy_inside(own_file.parent, own_file.name, lease.owner_file)
        except FileExistsError:
            return False
    finally:
        own_file.unlink(missing_ok=True)
    return True


def _is_owner_alive(folder: Path, token: int, owner: dict[str, Any], patience: float) -> bool:
    """Whether an owner that has not released its token still updates its counter."""
    known_alive = identity.is_alive(owner)
    if known_alive is not None:
        return known_alive
    first = _read_counter(folder, token)
    say(
        f"unisono: {folder} was last used by {_format_owner(owner)}, which cannot be checked from this host; waiting "
        f"{patience:g} s for a heartbeat",
        error=True,
    )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(0.2, patience / 10))
        if _read_counter(folder, token) != first or _newest_token(folder) != token:
            return True
        # What cannot be read may come from a file system that does not answer, and says nothing of the owner.
        if (now := _read_owner(folder, token)) is not None and now["released"]:
            return False
    return False


def _send_heartbeats(path: Path, interval: float, stop: threading.Event) -> None:
    count = 0
    while True:
        count += 1
        with suppress(OSError):  # tried again at the next beat; written in place, so that a full disk does not matter
            descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                os.pwrite(descriptor, b"%020d\n" % count, 0)
            finally:
                os.close(descriptor)
        if stop.wait(interval):
            return


def _inode(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev}-{status.st_ino}"


def _read_counter(folder: Path, token: int) -> str:
    with suppress(OSError):
        name = RunLock(folder, token).counter_file.name
        return safe_paths.read_bytes(folder / FOLDER, name, _LARGEST).decode("ascii", errors="replace")
    return ""


def _newest_token(folder: Path) -> int:
    """Return the largest token ever claimed; 0 if there is none.

    Raises:
        OSError: If that cannot be seen now.
    """
    try:
        names = os.listdir(folder / FOLDER)  # noqa: PTH208 - names only, since this runs every few seconds
    except (FileNotFoundError, NotADirectoryError):
        return 0
    tokens = [name[:-5] for name in names if name.endswith(".json") and name[:-5].isdecimal()]
    return max((int(token) for token in tokens if len(token) <= _MAX_DIGITS), default=0)


def _read_owner(folder: Path, token: int) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        return dict(safe_paths.read_json(folder / FOLDER, RunLock(folder, token).owner_file.name, Owner, _LARGEST))
    return None


def _format_owner(owner: dict[str, Any] | None) -> str:
    return f"process {owner['pid']} on {one_line(owner['host'], 60)}" if owner else "another process"


def _remove_old_tokens(lease: RunLock) -> None:
    for path in (lease.folder / FOLDER).iterdir():
        number = path.name.partition(".")[0]
        if number.isdecimal() and int(number) < lease.token - _TOKENS_KEPT:
            with suppress(OSError):  # what no run has written, as a folder of that name
                path.unlink()
