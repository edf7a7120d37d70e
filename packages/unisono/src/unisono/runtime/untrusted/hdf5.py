"""Checks an HDF5 file before it is read: that it reads no other file, and keeps its reader within time and memory.

HDF5's library follows damaged lengths and addresses of variable-length values, for minutes or into gigabytes, and
nothing can interrupt it. So a process of its own reads them first, within limits that the size of the file warrants.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.runtime.errors import DataError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.resource_limits import lower_limit
from unisono.runtime.untrusted.safe_paths import UnsafePathError

_FREE, _RATIO = 64 << 20, 1000  # bytes allowed for any array, plus bytes per byte of the file
_MEMORY, _MEMORY_RATIO = 512 << 20, 20  # bytes allowed for the process that reads, likewise
_SECONDS, _BYTES_PER_SECOND = 2, 4 << 20  # of processor time, and what is read in a further one at least
_WAIT = 60.0  # seconds that a busy machine may take besides
_BLOCK = 1 << 16  # values that are read at a time
_DAMAGED = " cannot be read as HDF5"


def check_hdf5(path: Path, shown: object = None) -> None:
    """Refuse an HDF5 file that reads others, claims arrays too large for it, or whose strings lead its reader astray.

    Args:
        path: Of the file.
        shown: Its name for messages; None for the path.

    Raises:
        UnsafePathError: Naming an entry that reads another file or claims too much.
        DataError: For a damaged file; naming the limits, if it exceeded them.
    """
    size, shown = path.stat().st_size, path if shown is None else shown
    answer = _ask_process(path, _WAIT + _seconds(size))
    if answer is None:
        raise DataError(
            f"{shown} cannot be read within {_seconds(size)} s and {_memory(size) >> 20} MB, which is far more than an "
            f"HDF5 file of {size} bytes needs; it is damaged or forged, so write or copy it again"
        )
    if answer.startswith(_DAMAGED):
        raise DataError(f"{shown}{answer}; it is damaged or forged, so write or copy it again")
    if answer:
        raise UnsafePathError(f"{shown}{answer}")


def _ask_process(path: Path, wait: float) -> str | None:
    """The answer of `check_within_limits` in a process of its own; None if it was ended, as by its limits."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "unisono.runtime.untrusted.hdf5",
        str(path),
    ]  # -P: nothing of this folder is imported
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=wait, check=False)
    except subprocess.TimeoutExpired:
        return None
    return str(safe_paths.parse_json(done.stdout, str)) if done.returncode == 0 else None


def check_within_limits(path: str) -> str:
    """What is wrong with a file, as the end of a sentence that begins with its name; empty if nothing is.

    Ends the process that calls it, if the file exceeds the limits.
    """
    import h5py
    import psutil

    size = Path(path).stat().st_size
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    lower_limit(resource.RLIMIT_CPU, used + 1 + _seconds(size))
    lower_limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + _memory(size))
    lower_limit(resource.RLIMIT_CORE, 0)
    try:
        with safe_paths.open_regular(path) as opened, h5py.File(safe_paths.path_of(opened)) as file:
            for name, entry in _entries(file):
                if wrong := _check_entry(entry, _FREE + _RATIO * size):
                    return f": '{one_line(name)}' {wrong}"
    except Exception as error:  # whatever h5py raises for a damaged file; memory refused by the limit is an OSError
        return f"{_DAMAGED} ({one_line(error)})"
    return ""


def _entries(file: Any) -> Iterator[tuple[str, Any]]:
    """All links and datasets of a file, each group once."""
    import h5py

    pending, seen = [file], set()
    while pending:
        group = pending.pop()
        if group.id in seen:
            continue
        seen.add(group.id)
        _read_attributes(group)
        for name in group:
            link = group.get(name, getlink=True)
            if isinstance(link, h5py.ExternalLink):
                yield name, link
            if not isinstance(link, h5py.HardLink):
                continue  # a link within the file, whose target is visited anyway
            entry = group[name]
            if isinstance(entry, h5py.Group):
                pending.append(entry)
            elif isinstance(entry, h5py.Dataset):
                yield name, entry


def _check_entry(entry: Any, limit: int) -> str:
    """What is wrong with a link or dataset; its values are read if their lengths vary."""
    import h5py

    if isinstance(entry, h5py.ExternalLink):
        return f"is a link to another file, '{one_line(entry.filename)}'; it was not read"
    if entry.external or entry.is_virtual:
        return "has its numbers in other files; it was not read"
    if entry.nbytes > limit:
        return f"would take {entry.nbytes} bytes, which a file of its size cannot hold"
    _read_attributes(entry)
    if entry.dtype.hasobject:
        for first in range(0, len(entry), _BLOCK) if entry.ndim else ():
            entry[first : first + _BLOCK]
        if not entry.ndim:
            entry[()]
    return ""


def _read_attributes(entry: Any) -> None:
    for name in entry.attrs:
        entry.attrs[name]


def _seconds(size: int) -> int:
    return _SECONDS + size // _BYTES_PER_SECOND


def _memory(size: int) -> int:
    return _MEMORY + _MEMORY_RATIO * size


if __name__ == "__main__":
    sys.stdout.write(json.dumps(check_within_limits(sys.argv[1])))
