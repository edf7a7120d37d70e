"""One process of a host at a time at an entry of a cache; who waits says for whom, for how long, and until when."""

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

from unisono.runtime.errors import DataError
from unisono.runtime.files import write_whole
from unisono.runtime.text import one_line

log = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds after which a wait is reported


@contextmanager
def locked(entry: Path, wait: float) -> Iterator[None]:
    """Hold the lock of an entry, beside a note that says who holds it; the kernel lets go of it for whoever is killed.

    Args:
        entry: a file or folder; the lock and the note lie beside it.
        wait: seconds.

    Raises:
        DataError: naming who holds it, where the wait times out.
        OSError: where nothing can be written there.
    """
    lock, note = FileLock(f"{entry}.lock"), entry.with_name(f"{entry.name}.holder.json")
    patience = min(_PATIENCE, wait)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        log.warning("waiting for %s, which is computed by %s; at most %g s", entry, _holder(note), wait)
        try:
            lock.acquire(timeout=max(0.0, wait - patience))
        except Timeout as error:
            raise DataError(
                f"waited {wait:g} s for {entry}, which is computed by {_holder(note)}: see whether that process is "
                "still at work, and end it if it is not"
            ) from error
    try:
        write_whole(note, json.dumps({"host": gethostname(), "process": os.getpid(), "since": time.time()}))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(note.read_text(encoding="utf-8"))
        seconds = time.time() - float(found["since"])
        return f"process {int(found['process'])} on {one_line(found['host'])}, for {seconds:.0f} s"
    return "another process"
