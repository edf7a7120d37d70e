"""What takes long is computed by one process of a host, once, and found in the cache by all others and later.

An entry is a folder named by all that decides what is in it, so it never speaks of other data. It appears by one rename.
Whoever waits for another process says so, and for whom.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from unisono.data.sources.storage import derived
from unisono.runtime.errors import DataError
from unisono.runtime.files import cache_dir, whole_folder, write_whole

log = logging.getLogger(__name__)
T = TypeVar("T")
_PATIENCE = 5.0  # seconds before a wait is worth a line
_WAIT = 24 * 3600.0  # seconds
_DAMAGED = (OSError, ValueError, KeyError, EOFError)


def compute_once(
    kind: str,
    address: Any,
    make: Callable[[Path], None],
    load: Callable[[Path], T],
    *,
    cache: Path | None = None,
    wait: float = _WAIT,
) -> T:
    """What `make` has put into a folder of the cache, by whichever process came first, as `load` reads it.

    Args:
        kind: folder of the cache, e.g. the recipe's name.
        address: all that decides the content, as JSON: digests of files, settings, versions of libraries.
        make: fills a folder.
        load: reads a filled folder. Where it raises what a damaged file raises, the entry is made again, once.
        cache: None for `$UNISONO_CACHE` or `~/.cache/unisono`.
        wait: seconds to wait for another process that computes the same.

    Raises:
        DataError: for a cache that cannot be written, or a wait that timed out, naming the process that computes.

    Example:
        def make(folder: Path) -> None:
            np.save(folder / "mean.npy", mean_of(rows))

        mean = compute_once("mine", [rows.fingerprint], make, lambda folder: np.load(folder / "mean.npy"))
    """
    root = cache or cache_dir()
    folder = root / kind / hashlib.sha256(json.dumps(address, sort_keys=True).encode()).hexdigest()[:24]
    with suppress(*_DAMAGED):
        if folder.is_dir():
            return load(folder)
    try:
        derived(folder.parent)
        with _locked(folder, wait):
            with suppress(*_DAMAGED):
                if folder.is_dir():  # another process has made it meanwhile
                    return load(folder)
            shutil.rmtree(folder, ignore_errors=True)
            with whole_folder(folder) as temporary:
                make(temporary)
            return load(folder)
    except OSError as error:
        raise DataError(
            f"the cache {root} cannot be used ({error.strerror or error}); choose another one by data.cache or "
            "$UNISONO_CACHE"
        ) from error


def compute_array_once(
    kind: str,
    address: Any,
    make: Callable[[], NDArray[Any]],
    *,
    is_valid: Callable[[NDArray[Any]], bool] = lambda found: True,
    cache: Path | None = None,
    wait: float = _WAIT,
) -> NDArray[Any]:
    """An array that is computed once; arguments and errors as of `compute_once`.

    Args:
        kind: folder of the cache.
        address: all that decides the array.
        make: computes it.
        is_valid: whether an array that was kept can be it; else it is computed again.
        cache: None for the user's.
        wait: seconds.
    """

    def write(folder: Path) -> None:
        np.save(folder / "array.npy", make())

    def read(folder: Path) -> NDArray[Any]:
        found: NDArray[Any] = np.load(folder / "array.npy", allow_pickle=False)
        if not is_valid(found):
            raise ValueError(f"{folder} holds another array")
        return found

    return compute_once(kind, address, write, read, cache=cache, wait=wait)


@contextmanager
def _locked(folder: Path, wait: float) -> Iterator[None]:
    """Hold the lock of an entry, beside a note that says who holds it."""
    lock, note = FileLock(f"{folder}.lock"), folder.with_name(f"{folder.name}.holder.json")
    patience = min(_PATIENCE, wait)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        log.warning("waiting for %s, which is computed by %s", folder, _holder(note))
        try:
            lock.acquire(timeout=max(0.0, wait - patience))
        except Timeout as error:
            raise DataError(
                f"waited {wait:g} s for {folder}, which is computed by {_holder(note)}: see whether that process is still "
                "at work, and end it if it is not"
            ) from error
    try:
        write_whole(note, json.dumps({"host": gethostname(), "process": os.getpid(), "since": time.time()}))
        yield
    finally:
        note.unlink(missing_ok=True)
        lock.release()


def _holder(note: Path) -> str:
    with suppress(OSError, ValueError, KeyError):
        found = json.loads(note.read_text(encoding="utf-8"))
        return f"process {found['process']} on {found['host']}, for {time.time() - found['since']:.0f} s"
    return "another process"
