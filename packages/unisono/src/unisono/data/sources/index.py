"""Caches what requires reading a whole file: the positions of lines, and the decompressed content of a `.gz`.

Entries are keyed by path, size and stamp of the file, so they are never stale. If the cache cannot be written, indices
are recomputed each time. Nothing is ever written to the data directories.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.data.cache_lock import lock_entry
from unisono.data.sources.formats import npy
from unisono.data.sources.storage import File, create_cache_folder, wrap_read_errors
from unisono.runtime.errors import DataError
from unisono.runtime.files import atomic_file, cache_dir, check_private, make_cache_folder, make_private

_LAYOUT = 1  # version of the cache's layout
_WAIT = 3600.0  # seconds to wait for another process that reads the same file
_SMALL_BYTES = 1 << 20  # smaller files are read again rather than cached
_CHUNK = 1 << 24


def cached_array(file: File, what: str, find: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """An array computed from a file by `find`, cached unless the file is small."""
    if file.size < _SMALL_BYTES:
        return find()
    with contextlib.suppress(OSError):
        return npy.map_array(_cache_file(file, what, ".npy", lambda out: np.save(out, find())))
    return find()


def unpack_file(file: File) -> File:
    """Decompress a file into the cache.

    Raises:
        DataError: if it is damaged, or the cache cannot be written.
    """

    def parts() -> Iterator[bytes]:
        with wrap_read_errors(file), file.open_plain() as plain:
            while part := plain.read(_CHUNK):
                yield part

    try:
        place = _cache_file(file, "unpacked", "", lambda out: out.writelines(parts()))
        status = place.stat()
    except OSError as error:
        raise DataError(
            f"{file.path} cannot be unpacked into {_folder()} ({error}); unpack it yourself, or set "
            "$UNISONO_CACHE to another folder"
        ) from error
    return replace(file, path=str(place), size=status.st_size, stamp=str(status.st_mtime_ns), folder=None)


def _cache_file(file: File, what: str, suffix: str, write: Callable[[Any], object]) -> Path:
    """The cache's file for what is found in a data file, written unless it exists."""
    path = file.path if "://" in file.path else str(Path(file.path).absolute())
    address = json.dumps([_LAYOUT, what, path, file.size, file.stamp])
    place = _folder() / (hashlib.sha256(address.encode()).hexdigest()[:24] + suffix)
    make_cache_folder(place.parent)
    create_cache_folder(place.parent)
    check_private(place.parent)
    check_private(place)
    with lock_entry(place, _WAIT):
        if not place.is_file():
            with atomic_file(place) as temporary:
                with temporary.open("wb") as out:
                    write(out)
                make_private(temporary)
    return place


def _folder() -> Path:
    return cache_dir() / "sources"
