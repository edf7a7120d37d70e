"""A checkpoint's manifest: one JSON file, written last and verified by its own hash.

Nothing in a manifest is ever executed. It is accepted only if it is byte for byte what was written, since JSON can
spell the same value in several ways, and a flipped bit could turn one into another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from unisono.checkpoint.core.arrays import ArrayReader
from unisono.engines import host_arrays
from unisono.runtime.communication.communicator import Json
from unisono.runtime.errors import CheckpointError, FormatError, SaveError
from unisono.runtime.files import raise_unavailable
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import HashedFile, Integer, misfit

FORMAT = 2
NAME = "manifest.json"
LARGEST = 256 << 20  # bytes of a manifest: about a million pieces
_OF_ROWS = "carry/"  # arrays of which a run that is shorter than its batch saves only the rows that it has reached
_MAX_CUT = 8  # axes along which an array is cut
_FILE_NAME = re.compile(r"(?!\.)[^/\\\0]+")  # a file directly in the folder


class _File(HashedFile):
    header: HashedFile


class _Piece(TypedDict):
    file: str
    entry: str
    at: Integer
    bytes: Integer
    sha256: str
    shape: list[Integer]
    offset: list[Integer]


class _Array(TypedDict):
    shape: list[Integer]
    dtype: str
    pieces: list[_Piece]


class _Content(TypedDict):
    format: Integer
    step: Integer
    parent: str | None
    holds: Literal["everything", "model"]
    metric: dict[str, Any] | None
    about: dict[str, Any]
    state: dict[str, Any]
    sha256: str
    files: dict[str, _File]
    arrays: dict[str, _Array]


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint.

    Attributes:
        path: its folder.
        step: updates made.
        state: the state other than arrays.
        arrays: per array name its shape, dtype and pieces, as in the manifest.
        files: per file name its size in bytes, its SHA-256, and size and SHA-256 of its header.
        parent: name of the previous checkpoint, made by the run or resumed from; None if there was none.
        holds: `everything`, from which a run can resume, or `model`.
        metric: results of an evaluation of exactly this state; None if there was none.
        assets: SHA-256 of every asset that the task had written; None if the manifest has none.
        about: configuration, code, data, layout and versions of the run that made it.
        sha256: of all of the above, as stored in the manifest.
        verified: pieces, by file and entry, whose content this process has verified.
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
    assets: Mapping[str, str] | None = None
    sha256: str = ""
    verified: frozenset[tuple[str, str]] = frozenset()

    def reader(self) -> ArrayReader:
        """A reader of its arrays. Pieces that this process has verified are not hashed again."""
        return ArrayReader(self.path, self.arrays, self.verified)


def folder_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int:
    """The step in the name of a checkpoint's folder, which has at least eight digits; -1 for any other name.

    >>> parse_step("step-00001000"), parse_step("step-x"), parse_step(".fetching-step-00001000")
    (1000, -1, -1)
    """
    number = name.removeprefix("step-")
    return int(number) if name.startswith("step-") and number.isdecimal() and len(number) >= 8 else -1


def encode(content: Mapping[str, Json]) -> bytes:
    """The file content of a manifest; its hash comes last."""
    written = json.dumps({**content, "sha256": digest(content)}, indent=1).encode()
    if len(written) > LARGEST:
        raise SaveError(f"the manifest of a checkpoint would have {len(written)} bytes; at most {LARGEST} are allowed")
    return written


def digest(content: Mapping[str, Json]) -> str:
    """The hash of a manifest's content, unchanged by a round trip through a file."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_manifest(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest, verified by its own hash; the other files are not read.

    Raises:
        CheckpointError: if the manifest is missing, damaged or of another format.
        UnavailableError: if it cannot be read now.
    """
    file = path / NAME
    try:
        written = safe_paths.read_bytes(path, NAME, LARGEST)
        content = safe_paths.parse_json(written, Any)  # by `_Content`, once the format is known
        if not isinstance(content, dict) or "format" not in content:
            raise CheckpointError(f"{file} is not the manifest of a checkpoint. {deletion_advice(path)}")
        if content["format"] != FORMAT:
            raise FormatError(f"{path} has checkpoint format {content['format']}; this version reads {FORMAT}")
        if (wrong := misfit(content, _Content)) is not None:
            raise CheckpointError(
                f"{file} is not a manifest that can be used: {one_line(wrong)}. {deletion_advice(path)}"
            )
        sha256 = content.pop("sha256")
        if sha256 != digest(content) or written != encode(content):
            raise CheckpointError(f"{file} is damaged: its content is not what was written. {deletion_advice(path)}")
        result = Checkpoint(
            path, content["step"], content["state"], content["arrays"], content["files"], content["parent"],
            content["holds"], content["metric"], content["about"], content.get("assets"), sha256,
        )  # fmt: skip
        if parse_step(path.name) not in (-1, result.step):
            raise CheckpointError(f"{file} belongs to step {result.step}, unlike its folder. {deletion_advice(path)}")
        _check(result)
        return result
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        if isinstance(error, OSError):
            raise_unavailable(file, error)
        raise CheckpointError(f"{file} cannot be read: {error}. {deletion_advice(path)}") from error


def deletion_advice(path: Path) -> str:
    """The advice at the end of a message about a damaged checkpoint."""
    return f"Delete {path} to resume from an older checkpoint."


def merge_manifests(written: list[Json]) -> dict[str, Any]:
    """`files` and `arrays` of all ranks together."""
    files: dict[str, Any] = {}
    arrays: dict[str, Any] = {}
    for part in written:
        files |= part["files"]
        for name, array in part["arrays"].items():
            arrays.setdefault(name, {**array, "pieces": []})["pieces"] += array["pieces"]
    return {"arrays": arrays, "files": files}


def _fits(piece: Mapping[str, Any], whole: list[int], item: int) -> bool:
    """Whether a piece lies within its array and has the right number of bytes."""
    shape, offset = piece["shape"], piece["offset"]
    return (
        len(shape) == len(offset) == len(whole)
        and all(count and first + count <= length for first, count, length in zip(offset, shape, whole, strict=True))
        and piece["bytes"] == math.prod(shape) * item
    )


def _tile(pieces: list[Any], whole: list[int]) -> bool:
    """Whether pieces, which lie within an array, have each of its elements exactly once.

    A sum of boxes is one box if their corners, counted with the sign of their parity, are the corners of that box:
    all others cancel. So this takes time in proportion to the pieces, however they are arranged. Only axes along which
    some piece is cut have corners of interest.
    """
    if not math.prod(whole):
        return not pieces
    if len(pieces) == 1:
        return bool(pieces[0]["shape"] == whole)
    cut = [axis for axis in range(len(whole)) if any(piece["shape"][axis] != whole[axis] for piece in pieces)]
    if len(cut) > _MAX_CUT or not cut:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    signed = [(piece["offset"], piece["shape"], 1) for piece in pieces]
    for offset, shape, sign in [*signed, ([0] * len(whole), whole, -1)]:
        ends = [((offset[axis], 1), (offset[axis] + shape[axis], -1)) for axis in cut]
        for corner in itertools.product(*ends):
            corners[tuple(place for place, _ in corner)] += sign * math.prod(side for _, side in corner)
    return not any(corners.values())


def _follow_one_another(pieces: Sequence[Mapping[str, Any]], whole: list[int]) -> bool:
    """Whether pieces are ranges of whole rows that do not overlap."""
    ranges = sorted((piece["offset"][0], piece["offset"][0] + piece["shape"][0]) for piece in pieces)
    apart = all(before[1] <= after[0] for before, after in itertools.pairwise(ranges))
    return apart and all(piece["shape"][1:] == whole[1:] for piece in pieces)


def _check(checkpoint: Checkpoint) -> None:
    """Reject a manifest that points outside its folder, or leaves bytes of a file unverified: it may be malicious."""
    if checkpoint.assets is not None and not all(isinstance(each, str) for each in dict(checkpoint.assets).values()):
        raise CheckpointError(f"{checkpoint.path}: its digests of assets are invalid")
    ends = {name: [(0, file["header"]["size"])] for name, file in checkpoint.files.items()}
    for name, array in checkpoint.arrays.items():
        try:
            item = host_arrays.parse_dtype(array["dtype"]).itemsize
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.path}: '{one_line(name)}' has the unknown dtype '{one_line(array['dtype'])}'"
            ) from error
        for piece in array["pieces"]:
            if piece["file"] not in ends:
                raise CheckpointError(
                    f"{checkpoint.path}: '{one_line(name)}' has a piece in '{one_line(piece['file'])}', which it does "
                    "not list"
                )
            if min([piece["at"], *piece["shape"], *piece["offset"]]) < 0:
                raise CheckpointError(f"{checkpoint.path}: a piece of '{one_line(name)}' has a negative offset or size")
            if not _fits(piece, array["shape"], item) or not piece["bytes"]:
                raise CheckpointError(f"{checkpoint.path}: a piece of '{one_line(name)}' lies outside of the array")
            ends[piece["file"]].append((piece["at"], piece["at"] + piece["bytes"]))
        whole = _follow_one_another if name.startswith(_OF_ROWS) else _tile
        if not whole(array["pieces"], array["shape"]):
            raise CheckpointError(
                f"{checkpoint.path}: the pieces of '{one_line(name)}' overlap or leave elements out, so its content is "
                f"not determined; do not trust this checkpoint. {deletion_advice(checkpoint.path)}"
            )
    for name, spans in ends.items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(f"{checkpoint.path}: '{one_line(name)}' is not a valid file name")
        reached = 0
        for begin, end in sorted(spans):
            if begin != reached:
                raise CheckpointError(f"{checkpoint.path}: bytes {reached} to {begin} of {name} belong to no array")
            reached = end
        if reached != checkpoint.files[name]["size"]:
            raise CheckpointError(f"{checkpoint.path}: bytes of {name} from {reached} on belong to no array")
