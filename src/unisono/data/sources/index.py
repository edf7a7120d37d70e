"""What has to be found out by reading a whole file, once: where lines begin, what a `.gz` unpacks to.

Kept beside the user's other caches, by what the file was when it was read, so it never speaks of another file; where
the cache cannot be written, it is found out again. The directories of the data are never written to.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from unisono.data.sources import npy
from unisono.data.sources.storage import File, derived, reading
from unisono.runtime.errors import DataError
from unisono.runtime.files import cache_dir, whole

_LAYOUT = 1  # of what is kept; a change makes it unknown
_WAIT = 3600.0  # seconds to wait for another process that reads the same file
_SMALL = 1 << 20  # bytes of a file that is read again rather than remembered
_CHUNK = 1 << 24


def kept(file: File, what: str, find: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """An array that is found out by reading a file, from the cache where it was found out before."""
    if file.size < _SMALL:
        return find()
    place = _place(file, what).with_suffix(".npy")
    with contextlib.suppress(OSError, Timeout):
        derived(place.parent)
        with FileLock(f"{place}.lock", timeout=_WAIT):
            if not place.is_file():
                found = find()
                with whole(place) as temporary, temporary.open("wb") as out:
                    np.save(out, found)
        return npy.array_of(place)
    return find()


def unpacked(file: File) -> File:
    """A compressed file as a plain one in the cache.

    Raises:
        DataError: where it is damaged, or the cache cannot be written.
    """
    place = _place(file, "unpacked")
    try:
        derived(place.parent)
        with FileLock(f"{place}.lock", timeout=_WAIT):
            if not place.is_file():
                with (
                    whole(place) as temporary,
                    reading(file),
                    file.stream() as packed,
                    gzip.open(packed) as plain,
                    temporary.open("wb") as out,
                ):
                    shutil.copyfileobj(plain, out, _CHUNK)
        status = place.stat()
    except (OSError, Timeout) as error:
        raise DataError(
            f"{file.path} cannot be unpacked into {place.parent} ({error}); unpack it yourself, or choose another "
            "cache by $UNISONO_CACHE"
        ) from error
    return replace(file, path=str(place), size=status.st_size, stamp=str(status.st_mtime_ns))


def _place(file: File, what: str) -> Path:
    path = file.path if "://" in file.path else str(Path(file.path).absolute())
    address = json.dumps([_LAYOUT, what, path, file.size, file.stamp])
    return cache_dir() / "sources" / hashlib.sha256(address.encode()).hexdigest()[:24]
