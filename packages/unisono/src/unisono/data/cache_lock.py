"""Locks a cache entry for one process of a host; waiting processes log which process they wait for, and how long."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname

from filelock import FileLock, Timeout
from typing_extensions import TypedDict

from unisono.runtime.errors import DataError
from unisono.runtime.files import write_whole
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Integer, Number

log = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds after which a wait is reported


@contextmanager
def lock_entry(entry: Path, wait: float) -> Iterator[None]:
    """Hold the lock of an entry, with a note that names the holder. If the holder is killed, the kernel releases it.

    Args:
        entry: a file or folder; the lock and the note are files next to it.
        wait: timeout in seconds.

    Raises:
        DataError: naming the holder, if the wait times out.
        OSError: if the lock or the note cannot be written.
    """
    lock, note = FileLock(f"{entry}.lock"), entry.with_name(f"{entry.name}.holder.json")
    patience = min(_PATIENCE, wait)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        log.warning("waiting up to %g s for %s, which is being computed by %s", wait, entry, _holder(note))
        try:
            lock.acquire(timeout=max(0.0, wait - patience))
        except Timeout as error:
            raise DataError(
                f"waited {wait:g} s for {entry}, which is being computed by {_holder(note)}: check whether that "
                "process still makes progress, and stop it if it does not"
            ) from error
    try:
        write_whole(note, json.dumps({"host": gethostname(), "process": os.getpid(), "since": time.time()}))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


class _Holder(TypedDict):
    host: str
    process: Integer
    since: Number


def _holder(note: Path) -> str:
    with suppress(OSError, ValueError):
        found = safe_paths.read_json(note.parent, note.name, _Holder)
        seconds = max(0.0, time.time() - found["since"])  # by another host's clock, or one that was set back
        return f"process {found['process']} on {one_line(found['host'])}, for {seconds:.0f} s"
    return "another process"
