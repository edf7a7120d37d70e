"""Who may write into a run's folder: one start at a time, across hosts that share a file system.

    lease/00000007.json   the owner: host, process, when it began; its token is the number, which only ever grows
    lease/00000007.beat   a counter that the owner moves on while it lives

A token is taken by a hard link to a finished file, which fails where another has it, on network file systems too. An
owner that has not let go is dead if its process is gone, where that can be seen; else if its counter has not moved
for some seconds of the challenger's own clock. So neither wall clocks nor times of files are asked. An owner that only
slept finds a newer token and must write no more (`Lease.lost`).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.runtime.errors import RunError
from unisono.runtime.files import TEMPORARY, write_whole
from unisono.supervise import identity

FOLDER = "lease"
TOKEN = "UNISONO_LEASE"  # what processes of an owner find in their environment: its token and the folder
EVERY = 3.0  # seconds between two beats
PATIENCE = 20.0  # seconds without one, after which an owner that cannot be seen counts as dead
_KEPT = 4  # older tokens that are not removed


class Lease:
    """A token for a run's folder.

    Attributes:
        folder: of the run.
        token: a larger one than any before.
        seized: whether its owner before had not let go.
    """

    def __init__(self, folder: Path, token: int, seized: bool = False) -> None:
        self.folder, self.token, self.seized = folder, token, seized

    def lost(self) -> str | None:
        """Who has taken over the run since, as a sentence; None if nobody has."""
        newest = _newest(self.folder)
        if newest <= self.token:
            return None
        return (
            f"{self.folder} was taken over by {_described(_owner(self.folder, newest))}, as this run had given no sign "
            "of life for some time; it writes nothing more. That one goes on"
        )

    def check(self) -> None:
        """Refuse to go on if somebody has taken over.

        Raises:
            RunError: naming the new owner.
        """
        if told := self.lost():
            raise RunError(told)


def inherited(folder: Path) -> Lease | None:
    """The lease on a folder that this process or its launcher has."""
    token, _, of = os.environ.get(TOKEN, "").partition(":")
    return Lease(folder, int(token)) if of == str(folder.resolve()) else None


@contextmanager
def held(folder: Path, every: float = EVERY, patience: float = PATIENCE) -> Iterator[Lease]:
    """Take the lease of a folder that is there, keep it alive, and let go of it.

    Args:
        folder: of a run.
        every: seconds between two signs of life.
        patience: seconds without one, after which an owner on another host counts as dead.

    Raises:
        RunError: naming the owner, if there is one that lives.
        OSError: if nothing can be written there.
    """
    lease = _take(folder, every, patience)
    before = os.environ.get(TOKEN)
    os.environ[TOKEN] = f"{lease.token}:{folder.resolve()}"
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(_path(lease, "beat"), every, over), name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        thread.join(every)
        if before is None:
            os.environ.pop(TOKEN, None)
        else:
            os.environ[TOKEN] = before
        with suppress(OSError):  # the folder may be gone, or its disk
            if _path(lease, "json").is_file():  # else others have come and gone since
                write_whole(_path(lease, "json"), json.dumps({**identity.mine(), "released": True}) + "\n")


def holder(folder: Path) -> dict[str, Any] | None:
    """The process that has a run's folder and has not let go, as far as can be told at once; None if there is none."""
    owner = _owner(folder, _newest(folder))
    return None if owner is None or owner["released"] or identity.alive(owner) is False else owner


def _take(folder: Path, every: float, patience: float) -> Lease:
    (folder / FOLDER).mkdir(exist_ok=True)
    while True:
        newest = _newest(folder)
        owner = _owner(folder, newest)
        if newest and owner is None:
            if _newest(folder) != newest:
                continue  # others come and go
            owner = {"host": "an unknown host", "machine": "", "pid": 0, "released": False}  # it cannot be read, or yet
        seized = owner is not None and not owner["released"]
        if owner is not None and seized and _lives(folder, newest, owner, patience):
            raise RunError(
                f"{folder} is held by {_described(owner)}, which trains this run; wait until it has ended, end it, "
                "or choose another run.name"
            )
        lease = Lease(folder, newest + 1, seized)
        if _claimed(lease, every) and _newest(folder) == lease.token:
            _tidy(lease)
            return lease


def _claimed(lease: Lease, every: float) -> bool:
    """Whether nobody else has this token."""
    mine = _path(lease, f"json.{os.getpid()}-{threading.get_ident()}{TEMPORARY}")
    try:
        write_whole(mine, json.dumps({**identity.mine(), "every": every, "released": False}) + "\n")
        _path(lease, "beat").touch()
        os.link(mine, _path(lease, "json"))
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        try:  # a file system without hard links: the kernel makes one file of this name all the same
            with _path(lease, "json").open("x", encoding="utf-8") as file:
                file.write(mine.read_text(encoding="utf-8"))
        except FileExistsError:
            return False
    finally:
        mine.unlink(missing_ok=True)
    return True


def _lives(folder: Path, token: int, owner: dict[str, Any], patience: float) -> bool:
    """Whether an owner that has not let go gives a sign of life."""
    seen = identity.alive(owner)
    if seen is not None:
        return seen
    first = _counter(folder, token)
    print(  # noqa: T201 - before there is a log
        f"unisono: {folder} was last held by {_described(owner)}, which cannot be seen from here; waiting "
        f"{patience:g} s for a sign of life",
        file=sys.stderr,
        flush=True,
    )
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(0.2, patience / 10))
        if _counter(folder, token) != first or _newest(folder) != token:
            return True
        if (now := _owner(folder, token)) is None or now["released"]:
            return False
    return False


def _beat(path: Path, every: float, over: threading.Event) -> None:
    count = 0
    while True:
        count += 1
        with suppress(OSError):  # and again in a moment; in place, so that a full disk is no matter
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.pwrite(descriptor, b"%020d\n" % count, 0)
            finally:
                os.close(descriptor)
        if over.wait(every):
            return


def _counter(folder: Path, token: int) -> str:
    with suppress(OSError):
        return _path(Lease(folder, token), "beat").read_text(encoding="ascii", errors="replace")
    return ""


def _newest(folder: Path) -> int:
    """The largest token that was ever taken; 0 if none was."""
    try:
        names = os.listdir(folder / FOLDER)  # noqa: PTH208 - names alone, for every few seconds
    except OSError:
        return 0
    return max((int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()), default=0)


def _owner(folder: Path, token: int) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found = json.loads(_path(Lease(folder, token), "json").read_text(encoding="utf-8"))
        if isinstance(found, dict) and {"host", "machine", "pid", "born", "released"} <= found.keys():
            return found
    return None


def _described(owner: dict[str, Any] | None) -> str:
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"


def _tidy(lease: Lease) -> None:
    for path in (lease.folder / FOLDER).iterdir():
        number = path.name.partition(".")[0]
        if number.isdecimal() and int(number) < lease.token - _KEPT:
            path.unlink(missing_ok=True)


def _path(lease: Lease, kind: str) -> Path:
    return lease.folder / FOLDER / f"{lease.token:08d}.{kind}"
