"""Computes slow things once per host: one process does the work, and all others find the result in the cache.

An entry is a folder whose name is a hash of everything that determines its content, so it is never stale. It appears
atomically, by a rename. A process that waits for another logs which one it waits for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from unisono.data.cache_lock import lock_entry
from unisono.data.sources.storage import create_cache_folder
from unisono.runtime.errors import DataError, UnisonoError
from unisono.runtime.files import atomic_folder, cache_dir, cache_entry, make_private
from unisono.runtime.untrusted import safe_paths

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
    """Compute something in the first process that needs it, cache it in a folder, and load it in all processes.

    Args:
        kind: subfolder of the cache, e.g. the recipe's name.
        address: everything that determines the content, as JSON: digests of files, settings, versions of libraries.
        make: writes the content into a folder.
        load: reads it from the folder. If it raises an error typical of damaged files, the entry is rebuilt, once.
        cache: None for `$UNISONO_CACHE` or `~/.cache/unisono`.
        wait: seconds to wait for another process that computes the same entry.

    Raises:
        DataError: if the cache cannot be written, if others can write into it, or if the wait times out,
            naming the other process.

    Example:
        def make(folder: Path) -> None:
            np.save(folder / "mean.npy", mean_of(rows))

        mean = compute_once("mine", [rows.fingerprint], make, lambda folder: np.load(folder / "mean.npy"))
    """
    digest = hashlib.sha256(json.dumps(address, sort_keys=True).encode()).hexdigest()
    folder = cache_entry(kind, digest[:24], cache=cache)
    with suppress(*_DAMAGED_ERRORS):
        if folder.is_dir():
            return load(folder)
    try:
        create_cache_folder(folder.parent)
        with lock_entry(folder, wait):
            with suppress(*_DAMAGED_ERRORS):
                if folder.is_dir():  # another process computed it in the meantime
                    return load(folder)
            shutil.rmtree(folder, ignore_errors=True)
            with atomic_folder(folder) as temporary:
                make(temporary)
                make_private(temporary)
            return load(folder)
    except UnisonoError:  # of what `make` reads: a link is an OSError, too
        raise
    except OSError as error:
        root = cache or cache_dir()
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else root
        if not named.is_relative_to(root):  # of what `make` reads
            raise DataError(f"{named} cannot be used ({error.strerror or error})") from error
        raise DataError(
            f"the cache {root} cannot be used ({error.strerror or error}); set data.cache or $UNISONO_CACHE to "
            "another folder"
        ) from error


def compute_array_once(
    kind: str,
    address: Any,
    make: Callable[[], NDArray[Any]],
    *,
    is_valid: Callable[[NDArray[Any]], bool] = lambda found: True,
    cache: Path | None = None,
) -> NDArray[Any]:
    """Compute an array once and cache it; errors as for `compute_once`.

    Args:
        kind: subfolder of the cache.
        address: everything that determines the array, as JSON.
        make: computes the array.
        is_valid: checks a cached array; if False, it is computed again.
        cache: None for the user's.
    """

    def write(folder: Path) -> None:
        np.save(folder / "array.npy", make())

    def read(folder: Path) -> NDArray[Any]:
        found: NDArray[Any] = safe_paths.load_array(folder, "array.npy")
        if not is_valid(found):
            raise ValueError(f"{folder} holds another array")
        return found

    return compute_once(kind, address, write, read, cache=cache)
