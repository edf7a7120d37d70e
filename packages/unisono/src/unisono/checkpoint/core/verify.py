"""Verifies every byte of a checkpoint against its manifest; each rank verifies a share, and all agree on the result.

This finds damage before anything is loaded. Ranks do not hash again what any rank of their host has verified, since
they all read the same content from the system's page cache. What was verified only on another host is verified again
by the rank that reads it (`ArrayReader`).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.checkpoint.core.arrays import hash_range, header_misfit
from unisono.checkpoint.core.manifest import Checkpoint, deletion_advice
from unisono.runtime.communication.communicator import Communicator, Json, usable_cores
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.errors import CheckpointError
from unisono.runtime.files import raise_unavailable
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

_THREADS = 4  # per rank; hashing releases the GIL


@dataclass(frozen=True)
class _HashedRange:
    """A range of a file with a known hash: a piece of `array`, or the header if that is empty."""

    file: str
    at: int
    length: int
    sha256: str
    array: str = ""
    entry: str = ""


def verify_content(checkpoint: Checkpoint, group: Communicator) -> Checkpoint:
    """Verify all files of a checkpoint; collective. Returns it with the pieces that count as verified on this rank.

    Raises:
        CheckpointError: on every rank, naming the first files that are missing, damaged or from another checkpoint, and
            the arrays in them.
        UnavailableError: on every rank, if one cannot read its share now.
    """
    stretches = _hashed_ranges(checkpoint)
    mine = stretches[group.rank :: group.size]
    seen_by = _file_cache_id(checkpoint.path)

    def find_faults() -> Json:
        with ThreadPoolExecutor(min(_THREADS, usable_cores())) as threads:
            faults = {fault for fault in threads.map(lambda s: _find_fault(checkpoint, s), mine) if fault}
        return [sorted(faults), seen_by]

    everyone = raise_everywhere(group, find_faults, "all ranks to verify the checkpoint")
    found = sorted({fault for faults, _ in everyone for fault in faults})
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise CheckpointError(f"{'; '.join(found[:3])}{more}. {deletion_advice(checkpoint.path)}")
    here = [r for r, (_, other) in enumerate(everyone) if r == group.rank or (seen_by and other == seen_by)]
    known = {(s.file, s.entry) for rank in here for s in stretches[rank :: group.size] if s.entry}
    return replace(checkpoint, verified=frozenset(known))


def _file_cache_id(folder: Path) -> str | None:
    """The running kernel and the folder's inode, whose page cache processes with the same id share; None if unknown."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        number = folder.stat()
    except OSError:
        return None
    return f"{started} {number.st_dev} {number.st_ino}"


def _hashed_ranges(checkpoint: Checkpoint) -> list[_HashedRange]:
    """All ranges of all files, longest first, so that shares are about equal."""
    found = [
        _HashedRange(name, 0, file["header"]["size"], file["header"]["sha256"])
        for name, file in checkpoint.files.items()
    ]
    for name, array in checkpoint.arrays.items():
        for piece in array["pieces"]:
            found.append(
                _HashedRange(piece["file"], piece["at"], piece["bytes"], piece["sha256"], name, piece["entry"])
            )
    return sorted(found, key=lambda stretch: -stretch.length)


def _find_fault(checkpoint: Checkpoint, stretch: _HashedRange) -> str | None:
    """What is wrong with a range of a file; None if it is intact."""
    file, written = checkpoint.path / stretch.file, checkpoint.files[stretch.file]["size"]

    def holds() -> str:
        arrays = checkpoint.arrays.items()
        names = [name for name, array in arrays if any(piece["file"] == stretch.file for piece in array["pieces"])]
        return ", ".join(f"'{name}'" for name in names[:3])

    try:
        with safe_paths.open_inside(checkpoint.path, stretch.file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != written:
                return f"{file} is damaged: it has {size} bytes instead of {written}. It holds parts of {holds()}"
            found = hash_range(opened, stretch.at, stretch.length)
            if not stretch.entry and found == stretch.sha256:
                opened.seek(0)
                return _find_forged_header(checkpoint, stretch.file, opened.read(stretch.length))
    except safe_paths.UnsafePathError as error:
        return f"{error}. It should hold parts of {holds()}"
    except FileNotFoundError:
        return f"{file} is missing. It held parts of {holds()}"
    except OSError as error:
        raise_unavailable(file, error)
        return f"{file} cannot be read: {error.strerror or error}. It holds parts of {holds()}"
    if found == stretch.sha256:
        return None
    what = f"the content of '{stretch.array}'" if stretch.entry else "its header"
    return f"{file} is damaged: {what} is not what was written" + ("" if stretch.entry else f". It holds {holds()}")


def _find_forged_header(checkpoint: Checkpoint, file: str, header: bytes) -> str | None:
    """How an intact header contradicts the manifest; None if it does not."""
    pieces = (
        (piece, array["dtype"])
        for array in checkpoint.arrays.values()
        for piece in array["pieces"]
        if piece["file"] == file
    )
    if (wrong := header_misfit(header, pieces)) is None:
        return None
    return f"{checkpoint.path / file} does not have the arrays that its manifest says: {one_line(wrong)}"
