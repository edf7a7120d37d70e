"""Computes slow things once per host: one process does the work, and all others find the result in the cache.

An entry is a folder named by everything that determines its content, so it never holds other data. It appears by one
rename. A process that waits for another says so, and for which.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from unisono.data.cache_lock import locked
from unisono.data.sources.storage import derived
from unisono.runtime.errors import DataError
from unisono.runtime.files import atomic_folder, cache_dir

T = TypeVar("T")
_LOCK_TIMEOUT = 24 * 3600.0  # seconds
_DAMAGED_ERRORS = (OSError, ValueError, KeyError, EOFError)


def compute_once(
    kind: str,
    address: Any,
    make: Callable[[Path], None],
    load: Callable[[Path], T],
    *,
    cache: Path | None = None,
    wait: float = _LOCK_TIMEOUT,
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
    with suppress(*_DAMAGED_ERRORS):
        if folder.is_dir():
            return load(folder)
    try:
        derived(folder.parent)
        with locked(folder, wait):
            with suppress(*_DAMAGED_ERRORS):
                if folder.is_dir():  # another process has made it meanwhile
                    return load(folder)
            shutil.rmtree(folder, ignore_errors=True)
            with atomic_folder(folder) as temporary:
                make(temporary)
            return load(folder)
    except OSError as error:
        raise DataError(
            f"the cache {root} cannot be used ({error.strerror or error}); set data.cache or $UNISONO_CACHE "
            "to another folder"
        ) from error


def compute_array_once(
    kind: str,
    address: Any,
    make: Callable[[], NDArray[Any]],
    *,
    is_valid: Callable[[NDArray[Any]], bool] = lambda found: True,
    cache: Path | None = None,
    wait: float = _LOCK_TIMEOUT,
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
