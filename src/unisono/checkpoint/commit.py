"""The protocol on disk: a checkpoint is whole or absent.

Every rank writes its pieces into one temporary folder; rank 0 writes the manifest last, flushes everything to the disk
and renames the folder. Only then may older checkpoints go. A folder without a manifest, or whose name is temporary, is
not a checkpoint. A manifest holds JSON and nothing on the way back is unpickled.

runs/<name>/checkpoints/
  step-00001000/
    rank-00000.safetensors …   pieces of arrays
    manifest.json              step, state, and for every array: shape, dtype and where its pieces lie; size and hash
    of every file, and a hash of all this
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint import arrays
from unisono.errors import CheckpointError, FormatError
from unisono.files import sync
from unisono.place import Group, Json
from unisono.state import Shard

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".writing-"


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint.

    Attributes:
        path: its folder.
        step: updates made.
        state: what the trainer keeps besides arrays.
        arrays: per array name its shape, dtype and pieces, as in the manifest.
        files: per file name its size in bytes and its SHA-256.
    """

    path: Path
    step: int
    state: dict[str, Json]
    arrays: dict[str, Any]
    files: dict[str, Any]


def save(folder: Path, step: int, shards: Sequence[Shard], state: dict[str, Json], group: Group, keep: int) -> Path:
    """Write one checkpoint; collective. Returns its folder.

    Args:
        folder: `checkpoints` of the run.
        step: updates made.
        shards: this rank's pieces; those of all ranks make the state whole.
        state: JSON, the same on every rank.
        group: all ranks.
        keep: how many of the newest checkpoints remain.

    Raises:
        CheckpointError: on every rank if one of them could not write; older checkpoints stay as they were.
    """
    final = folder / f"step-{step:08d}"
    temporary = folder / f"{_TEMPORARY}{final.name}"

    def begin() -> None:
        if group.rank == 0:
            _sweep(folder)
            temporary.mkdir(parents=True)

    _agree(group, "make a folder for the checkpoint", begin)
    written = _agree(group, "write its part of the checkpoint", lambda: _write_pieces(temporary, shards, group.rank))

    def finish() -> None:
        if group.rank == 0:
            manifest = {"format": FORMAT, "step": step, "state": state, **_merge(written)}
            manifest["sha256"] = _digest(manifest)
            _write(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
            sync(temporary)
            temporary.rename(final)
            sync(folder)
            for old in find(folder)[:-keep]:  # goes as it came, by one rename: a half of it must not be found
                shutil.rmtree(old.rename(folder / f"{_TEMPORARY}{old.name}"))

    _agree(group, "finish the checkpoint", finish)
    return final


def find(folder: Path) -> list[Path]:
    """Finished checkpoints in a folder, the oldest first."""
    found = [
        path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / "manifest.json").is_file()
    ]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read(path: Path) -> Checkpoint:
    """What a checkpoint's manifest says, verified by its own hash; the other files are not looked at.

    Raises:
        CheckpointError: if the manifest is missing, damaged or of another format.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise FormatError(f"{path} has checkpoint format {manifest['format']}; this version reads {FORMAT}")
        if manifest.pop("sha256") != _digest(manifest):
            raise CheckpointError(
                f"{path / 'manifest.json'} is damaged: its content is not what was written. {_advice(path)}"
            )
        return Checkpoint(path, manifest["step"], manifest["state"], manifest["arrays"], manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path / 'manifest.json'} cannot be read: {error}. {_advice(path)}") from error


def open_(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and verify the size and the hash of every file.

    Raises:
        CheckpointError: naming the file that is missing, damaged or of another format.
    """
    checkpoint = read(path)
    for name, written in checkpoint.files.items():
        fault = _fault(path / name, written)
        if fault:
            held = ", ".join(_held_by(checkpoint, name)[:3])
            raise CheckpointError(f"{path / name} {fault}. It holds parts of {held}. {_advice(path)}")
    return checkpoint


def _write_pieces(folder: Path, shards: Sequence[Shard], rank: int) -> Json:
    """This rank's file, and what the manifest says of it."""
    if not shards:
        return {"files": {}, "arrays": {}}
    file = folder / f"rank-{rank:05d}.safetensors"
    described = arrays.write(file, shards)
    sync(file)
    return {"files": {file.name: {"size": file.stat().st_size, "sha256": _hash(file)}}, "arrays": described}


def _merge(written: Sequence[Json]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    for part in written:
        files |= part["files"]
        for name, array in part["arrays"].items():
            merged.setdefault(name, {**array, "pieces": []})["pieces"] += array["pieces"]
    return {"files": files, "arrays": merged}


def _agree(group: Group, what: str, act: Any) -> list[Json]:
    """Let every rank act, and let all of them fail if one of them did."""
    result, fault = None, None
    try:
        result = act()
    except OSError as error:
        fault = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    outcomes = group.gather([result, fault], f"all ranks to {what}")
    faults = [f"rank {rank} could not {what}: {why}" for rank, (_, why) in enumerate(outcomes) if why]
    if faults:
        raise CheckpointError("; ".join(faults) + ". Older checkpoints are untouched.")
    return [outcome for outcome, _ in outcomes]


def _fault(file: Path, written: dict[str, Any]) -> str | None:
    """What is wrong with a file, if it is not what was written."""
    if not file.is_file():
        return "is missing"
    if (size := file.stat().st_size) != written["size"]:
        return f"is damaged: it has {size} bytes, and {written['size']} were written"
    return None if _hash(file) == written["sha256"] else "is damaged: its content is not what was written"


def _advice(path: Path) -> str:
    return f"Delete {path} to go on from an older checkpoint."


def _held_by(checkpoint: Checkpoint, file: str) -> list[str]:
    return [
        name for name, array in checkpoint.arrays.items() if any(piece["file"] == file for piece in array["pieces"])
    ]


def _sweep(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)


def _digest(manifest: dict[str, Any]) -> str:
    """The hash of a manifest's content, the same after a way through a file."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
