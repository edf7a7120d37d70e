"""What a checkpoint says of itself: one JSON file, written last and known by its own hash.

A manifest holds no byte that anything executes. It is read only if it is, byte for byte, what was written: JSON has
several spellings of the same value, and a flipped bit may turn one into another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.checkpoint.core.arrays import ArrayReader
from unisono.runtime.communicator import Json
from unisono.runtime.errors import CheckpointError, FormatError

FORMAT = 2
NAME = "manifest.json"
_PLAIN = re.compile(r"(?!\.)[^/\\\0]+")  # a file of the folder itself


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint.

    Attributes:
        path: its folder.
        step: updates made.
        state: what the trainer keeps besides arrays.
        arrays: per array name its shape, dtype and pieces, as in the manifest.
        files: per file name its size in bytes, its SHA-256, and size and SHA-256 of its header.
        parent: name of the checkpoint that the run made, or came from, before this one; None if there was none.
        holds: `everything`, from which a run can go on, or `model`.
        metric: what an evaluation of this very state came to; None if there was none.
        about: configuration, code, data, layout and versions of the run that made it.
        sha256: of all this, as it stands in the manifest.
        verified: pieces, by file and entry, whose content this process has found to be what was written.
    """

    path: Path
    step: int
    state: dict[str, Json]
    arrays: dict[str, Any]
    files: dict[str, Any]
    parent: str | None = None
    holds: str = "everything"
    metric: Mapping[str, float] | None = None
    about: Mapping[str, Json] = field(default_factory=dict)
    sha256: str = ""
    verified: frozenset[tuple[str, str]] = frozenset()

    def reader(self) -> ArrayReader:
        """Its arrays. What this process has verified is not hashed again."""
        return ArrayReader(self.path, self.arrays, self.verified)


def dumps(content: Mapping[str, Json]) -> bytes:
    """A manifest as it stands in its file; its hash comes last."""
    return json.dumps({**content, "sha256": digest(content)}, indent=1).encode()


def digest(content: Mapping[str, Json]) -> str:
    """The hash of a manifest's content, the same after a way through a file."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read(path: Path) -> Checkpoint:
    """What a checkpoint's manifest says, verified by its own hash; the other files are not looked at.

    Raises:
        CheckpointError: if the manifest is missing, damaged or of another format.
    """
    file = path / NAME
    try:
        written = file.read_bytes()
        content = json.loads(written.decode())
        if content["format"] != FORMAT:
            raise FormatError(f"{path} has checkpoint format {content['format']}; this version reads {FORMAT}")
        sha256 = content.pop("sha256")
        if sha256 != digest(content) or written != dumps(content):
            raise CheckpointError(f"{file} is damaged: its content is not what was written. {advice(path)}")
        result = Checkpoint(
            path, content["step"], content["state"], content["arrays"], content["files"], content["parent"],
            content["holds"], content["metric"], content["about"], sha256,
        )  # fmt: skip
        named = re.fullmatch(r"step-(\d+)", path.name)
        if named and int(named[1]) != result.step:
            raise CheckpointError(f"{file} is of step {result.step}, not of its folder's. {advice(path)}")
        _check(result)
        return result
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} cannot be read: {error}. {advice(path)}") from error


def advice(path: Path) -> str:
    """The end of a sentence about a damaged checkpoint."""
    return f"Delete {path} to go on from an older checkpoint."


def merge(written: list[Json]) -> dict[str, Any]:
    """`files` and `arrays` of all ranks together."""
    files: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for part in written:
        files |= part["files"]
        for name, array in part["arrays"].items():
            arrays.setdefault(name, {**array, "pieces": []})["pieces"] += array["pieces"]
    return {"arrays": arrays, "files": files}


def _check(checkpoint: Checkpoint) -> None:
    """Refuse a manifest that leads out of its folder, or whose pieces leave bytes of a file that nobody would verify.

    The hash guards against damage, not against malice: a manifest may come from anywhere.
    """
    ends = {name: [(0, file["header"]["size"])] for name, file in checkpoint.files.items()}
    for name, array in checkpoint.arrays.items():
        for piece in array["pieces"]:
            if piece["file"] not in ends:
                raise CheckpointError(f"{checkpoint.path}: a piece of '{name}' is in {piece['file']!r}, no file of it")
            if min([piece["at"], *piece["shape"], *piece["offset"]]) < 0:
                raise CheckpointError(f"{checkpoint.path}: a piece of '{name}' has a negative place")
            ends[piece["file"]].append((piece["at"], piece["at"] + piece["bytes"]))
    for name, spans in ends.items():
        if not _PLAIN.fullmatch(name):
            raise CheckpointError(f"{checkpoint.path}: {name!r} cannot be the name of a file of it")
        reached = 0
        for begin, end in sorted(spans):
            if begin != reached:
                raise CheckpointError(f"{checkpoint.path}: bytes {reached} to {begin} of {name} belong to nothing")
            reached = end
        if reached != checkpoint.files[name]["size"]:
            raise CheckpointError(f"{checkpoint.path}: bytes from {reached} of {name} on belong to nothing")
