"""Every byte of a checkpoint, held against its manifest: by all ranks together, each a share, and all agree.

This is what finds damage before anything of a checkpoint has been taken over. What was verified on a host is then read
there without being hashed again, by whichever of its ranks: all of them have the same content of a file from the
system's one cache of it. What only another host has seen is verified once more by the rank that reads it
(`ArrayReader`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.checkpoint.core.arrays import hash_of
from unisono.checkpoint.core.manifest import Checkpoint, advice
from unisono.runtime.communicator import Group, cores
from unisono.runtime.errors import CheckpointError

_THREADS = 4  # of a rank; hashing lets go of the interpreter


@dataclass(frozen=True)
class _Stretch:
    """Bytes of a file with a known hash; `array` has them, or nobody where they are the header."""

    file: str
    at: int
    length: int
    sha256: str
    array: str = ""
    entry: str = ""


def content(checkpoint: Checkpoint, group: Group) -> Checkpoint:
    """Verify all files of a checkpoint; collective. Returns it with what this rank has verified.

    Raises:
        CheckpointError: on every rank, naming the first files that are missing, damaged or of another checkpoint, and
            the arrays in them.
    """
    stretches = _stretches(checkpoint)
    mine = stretches[group.rank :: group.size]
    with ThreadPoolExecutor(min(_THREADS, cores())) as threads:
        faults = sorted({fault for fault in threads.map(lambda s: _fault(checkpoint, s), mine) if fault})
    seen_by = _seen_by(checkpoint.path)
    everyone = group.gather([faults, seen_by], "all ranks to verify the checkpoint")
    found = sorted({fault for told, _ in everyone for fault in told})
    if found:
        more = f" (and {len(found) - 3} more faults)" if len(found) > 3 else ""
        raise CheckpointError(f"{'; '.join(found[:3])}{more}. {advice(checkpoint.path)}")
    here = [r for r, (_, other) in enumerate(everyone) if r == group.rank or (seen_by and other == seen_by)]
    known = {(s.file, s.entry) for rank in here for s in stretches[rank :: group.size] if s.entry}
    return replace(checkpoint, verified=frozenset(known))


def _seen_by(folder: Path) -> str | None:
    """The kernel that reads a folder, and the folder's number there; None where a system does not tell.

    Processes with the same have one cache of its files between them: containers of a host, too, but not two mounts.
    """
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        number = folder.stat()
    except OSError:
        return None
    return f"{started} {number.st_dev} {number.st_ino}"


def _stretches(checkpoint: Checkpoint) -> list[_Stretch]:
    """All bytes of all files, the longest stretches first, so that shares are about equal."""
    found = [
        _Stretch(name, 0, file["header"]["size"], file["header"]["sha256"]) for name, file in checkpoint.files.items()
    ]
    for name, array in checkpoint.arrays.items():
        for piece in array["pieces"]:
            found.append(_Stretch(piece["file"], piece["at"], piece["bytes"], piece["sha256"], name, piece["entry"]))
    return sorted(found, key=lambda stretch: -stretch.length)


def _fault(checkpoint: Checkpoint, stretch: _Stretch) -> str | None:
    """What is wrong with a stretch of a file, if it is not what was written."""
    file, written = checkpoint.path / stretch.file, checkpoint.files[stretch.file]["size"]

    def holds() -> str:
        return ", ".join(f"'{name}'" for name in held_by(checkpoint, stretch.file)[:3])

    try:
        if file.is_symlink():
            return f"{file} is a link; the files of a checkpoint lie in its folder. It holds parts of {holds()}"
        size = file.stat().st_size
        if size != written:
            return f"{file} is damaged: it has {size} bytes, and {written} were written. It holds parts of {holds()}"
        found = hash_of(file, stretch.at, stretch.length)
    except FileNotFoundError:
        return f"{file} is missing. It holds parts of {holds()}"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}. It holds parts of {holds()}"
    if found == stretch.sha256:
        return None
    what = f"the content of '{stretch.array}'" if stretch.entry else "its header"
    return f"{file} is damaged: {what} is not what was written" + ("" if stretch.entry else f". It holds {holds()}")


def held_by(checkpoint: Checkpoint, file: str) -> list[str]:
    """Names of the arrays with pieces in a file."""
    return [
        name for name, array in checkpoint.arrays.items() if any(piece["file"] == file for piece in array["pieces"])
    ]
