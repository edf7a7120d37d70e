"""Every byte of a checkpoint, held against its manifest: by all ranks together, each a share, and all agree.

A piece that a rank reads for itself is verified by that rank too (`ArrayReader`); this is what finds damage before
anything of a checkpoint has been taken over.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from unisono.checkpoint.arrays import hash_of
from unisono.checkpoint.manifest import Checkpoint, advice
from unisono.errors import CheckpointError
from unisono.place import Group, cores

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
    seen: set[tuple[str, str]] = set()
    faults: list[str] = []
    with ThreadPoolExecutor(min(_THREADS, cores())) as threads:
        for stretch, fault in zip(mine, threads.map(lambda s: _fault(checkpoint, s), mine), strict=True):
            if fault:
                faults.append(fault)
            elif stretch.entry:
                seen.add((stretch.file, stretch.entry))
    everyone = group.gather(sorted(set(faults)), "all ranks to verify the checkpoint")
    found = sorted({fault for told in everyone for fault in told})
    if found:
        more = f" (and {len(found) - 3} more faults)" if len(found) > 3 else ""
        raise CheckpointError(f"{'; '.join(found[:3])}{more}. {advice(checkpoint.path)}")
    return replace(checkpoint, verified=frozenset(seen))


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
    holds = ", ".join(f"'{name}'" for name in held_by(checkpoint, stretch.file)[:3])
    try:
        if file.is_symlink():
            return f"{file} is a link; the files of a checkpoint lie in its folder. It holds parts of {holds}"
        size = file.stat().st_size
        if size != written:
            return f"{file} is damaged: it has {size} bytes, and {written} were written. It holds parts of {holds}"
        found = hash_of(file, stretch.at, stretch.length)
    except FileNotFoundError:
        return f"{file} is missing. It holds parts of {holds}"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}. It holds parts of {holds}"
    if found == stretch.sha256:
        return None
    what = f"the content of '{stretch.array}'" if stretch.entry else "its header"
    return f"{file} is damaged: {what} is not what was written" + ("" if stretch.entry else f". It holds {holds}")


def held_by(checkpoint: Checkpoint, file: str) -> list[str]:
    """Names of the arrays with pieces in a file."""
    return [
        name for name, array in checkpoint.arrays.items() if any(piece["file"] == file for piece in array["pieces"])
    ]
