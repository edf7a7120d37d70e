"""Folders of torch.distributed.checkpoint (DCP), as torchtitan and other users of FSDP write them.

`.metadata` is a pickle of torch's own classes, and files `*.distcp` hold the pieces of all tensors. Here each class of
the metadata is a stand-in that only keeps what it is given, so reading it imports and runs nothing, and pieces are read
by torch's restricted reader. It happens in the sandboxed process, as with any pickle.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.engines.state import ADAM_MOMENTS
from unisono.runtime.errors import CheckpointError

METADATA, SUFFIX = ".metadata", ".distcp"
# What the metadata of torch 2.1 to 2.13 names. All are stand-ins; anything else is refused.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")
_MODEL = "model"  # under which a checkpoint most often has its weights
# Adam's, of `state_dict()` of an optimizer, by names or numbers of parameters, whether or not its keys are flattened.
_MOMENT = re.compile(rf"(?:(.*)\.)?state\.(.+)\.({'|'.join(ADAM_MOMENTS)})")
_SETTINGS = "param_groups"  # of an optimizer, in the same place
Taking = Literal["weights", "weights beside moments", "moments"]  # of a folder, which may be read for both


class _StandIn:
    """An object of a class of torch: what it was called with, and its state."""

    state: Any = None

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """An attribute of what this stands for."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise CheckpointError(f"has no '{name}' where torch.distributed.checkpoint writes one")
        return self.state[name]


class _Reader(pickle.Unpickler):
    """Reads the metadata; whatever a pickle calls is a stand-in."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return _size
        if module in ("torch", "torch.serialization"):  # dtypes, and functions that return a layout
            return _StandIn if name.startswith("_") else f"torch.{name}"
        if module == "collections" and name in ("OrderedDict", "defaultdict"):
            return dict
        if module in _MODULES:
            return _StandIn
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _size(numbers: Any = ()) -> tuple[int, ...]:
    found = tuple(numbers)
    if not all(type(number) is int and number >= 0 for number in found):
        raise CheckpointError(f"has {found!r:.80} for a size")
    return found


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, and where its bytes are.

    Attributes:
        offset: in the tensor, one per axis.
        shape: of the piece.
        file: by its name in the folder.
        start: of its bytes in the file.
        length: of its bytes.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of the folder.

    Attributes:
        path: of the keys under which it is, e.g. `("model", "head.weight")`.
        dtype: as torch names it, e.g. `torch.float32`.
        shape: of the whole tensor.
        pieces: that it consists of.
    """

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def read_metadata(content: bytes) -> tuple[list[SavedTensor], list[tuple[str, ...]]]:
    """The tensors of a folder, and the paths of everything else in it.

    Raises:
        CheckpointError: where it is not the metadata of such a folder, as the end of a sentence.
        pickle.UnpicklingError: for a pickle of other things; nothing of it was run.
    """
    top = _Reader(io.BytesIO(content)).load()
    if not isinstance(top, _StandIn):
        raise CheckpointError("is not the metadata of torch.distributed.checkpoint")
    saved, stored = top.get("state_dict_metadata"), top.get("storage_data")
    paths = top.state.get("planner_data") if isinstance(top.state, dict) else None
    if not isinstance(saved, Mapping) or not isinstance(stored, Mapping):
        raise CheckpointError("is not the metadata of torch.distributed.checkpoint")
    places: dict[tuple[str, tuple[int, ...]], _StandIn] = {}
    for index, info in stored.items():
        offset = index.state.get("offset") or ()  # plain data have none
        places[index.get("fqn"), tuple(offset)] = info
    tensors, others = [], []
    for name, described in saved.items():
        path = tuple(map(str, (paths or {}).get(name, (name,))))
        if (
            not isinstance(described, _StandIn)
            or not isinstance(described.state, dict)
            or "chunks" not in described.state
        ):
            others.append(path)
            continue
        pieces = tuple(_piece(name, chunk, places) for chunk in described.get("chunks"))
        tensors.append(SavedTensor(path, _dtype(described.get("properties")), described.get("size"), pieces))
    return tensors, others


def choose_tensors(
    tensors: Sequence[SavedTensor], key: str | None, beside_moments: bool = False
) -> tuple[dict[str, SavedTensor], list[str]]:
    """The tensors to import by name, and descriptions of those beside them.

    Args:
        tensors: of the folder.
        key: the keys above them, e.g. `optimizer/state`; None for `model` if there is one, else for those at the top,
            where torchtitan writes its weights.
        beside_moments: moments of Adam are imported, too.

    Raises:
        CheckpointError: where there are none, saying what there is, as the end of a sentence.
    """
    groups: dict[str, int] = {}
    for one in tensors:
        if beside_moments and _MOMENT.fullmatch(".".join(one.path)):
            continue
        group = one.path[0] if len(one.path) > 1 else ""
        groups[group] = groups.get(group, 0) + 1
    wanted = tuple(key.split("/")) if key else (_MODEL,) if _MODEL in groups else ()
    found: dict[str, SavedTensor] = {}
    for one in tensors:
        is_wanted = one.path[: len(wanted)] == wanted and len(one.path) > len(wanted) if wanted else len(one.path) == 1
        if is_wanted:
            _put(found, ".".join(one.path[len(wanted) :]), one)
    shown = [f"{name} ({count} tensor{'s' * (count != 1)})" for name, count in groups.items() if name]
    if not found:
        at = f" at key={key}" if key else " at its top, nor under model"
        raise CheckpointError(
            f"has no tensors{at}; there are {', '.join(shown) or 'none at all'}. Choose with key=NAME"
        )
    return found, [text for text in shown if not wanted or not text.startswith(f"{wanted[0]} (")]


def _put(found: dict[str, SavedTensor], name: str, one: SavedTensor) -> None:
    if name in ("", "__metadata__"):  # which is no tensor's in a safetensors file
        raise CheckpointError(f"has a tensor under '{name}', which is not a valid name")
    if name in found:
        raise CheckpointError(f"has two tensors of the name '{name}', and nobody can tell which is meant")
    found[name] = one


def choose_moments(
    tensors: Sequence[SavedTensor], others: Sequence[tuple[str, ...]]
) -> tuple[dict[str, SavedTensor], list[str]]:
    """The moments of Adam as `NAME.exp_avg`, `NAME.exp_avg_sq` and `NAME.step`, and descriptions of incomplete ones.

    Args:
        tensors: of the folder.
        others: paths of what else is in it, groups of parameters among them.

    Raises:
        CheckpointError: where there are none, or nobody can tell whose they are, as the end of a sentence.
    """
    found: dict[str, dict[str, SavedTensor]] = {}
    for one in tensors:
        if (match := _MOMENT.fullmatch(".".join(one.path))) is None:
            continue
        _, name, entry = match.groups()
        if entry in found.setdefault(name, {}):
            raise CheckpointError(f"has moments of '{name}' twice, of two optimizers")
        found[name][entry] = one
    whole = {name: entries for name, entries in found.items() if entries.keys() == ADAM_MOMENTS}
    if not whole:
        raise CheckpointError("has no moments of Adam (exp_avg, exp_avg_sq and step, under the state of an optimizer)")
    groups = {path[at + 1] for path in others if _SETTINGS in path[:-1] for at in [path.index(_SETTINGS)]}
    if all(name.isdigit() for name in whole) and len(groups) > 1:
        raise CheckpointError(
            f"has moments by number in {len(groups)} groups, so nobody can tell of which parameters; save "
            "names instead, by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    left = [
        f"moments of {name} (without {' and '.join(sorted(ADAM_MOMENTS - entries.keys()))})"
        for name, entries in found.items()
        if name not in whole
    ]
    return {f"{name}.{entry}": one for name, entries in whole.items() for entry, one in entries.items()}, left


def describe_plain(others: Sequence[tuple[str, ...]], taking: Taking) -> list[str]:
    """What else is in a folder than tensors, none of which is imported.

    Args:
        others: the paths of it.
        taking: what is imported; of an optimizer whose moments are, only its settings are left.

    >>> describe_plain([("step",), ("optim", "param_groups", "w", "lr")], "weights beside moments")
    ["optim.param_groups (the optimizer's settings, such as lr)", 'step (plain data)']
    """
    if taking == "moments":  # told with the weights
        return []
    found = set()
    for path in others:
        above, group, _ = ".".join(path).partition(_SETTINGS)
        told = taking == "weights beside moments" and group
        found.add(f"{above}{group} (the optimizer's settings, such as lr)" if told else f"{path[0]} (plain data)")
    return sorted(found)


def find_dtype(saved: SavedTensor) -> Any:
    """The dtype of a tensor, as torch's.

    Raises:
        CheckpointError: where torch has none of that name, as the end of a sentence.
    """
    import torch

    dtype = getattr(torch, saved.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"has '{'.'.join(saved.path)}' with the dtype {saved.dtype}, which torch does not have")
    return dtype


def read_tensor(saved: SavedTensor, files: Mapping[str, str]) -> Any:
    """A tensor, put together from its pieces.

    Args:
        saved: where they are.
        files: the path of each file of the folder, by its name.

    Raises:
        CheckpointError: where pieces are missing, overlap or are something else, as the end of a sentence.
    """
    import torch

    name, dtype = ".".join(saved.path), find_dtype(saved)
    whole, seen = torch.empty(saved.shape, dtype=dtype), torch.zeros(saved.shape, dtype=torch.bool)
    for piece in saved.pieces:
        if piece.file not in files:
            raise CheckpointError(f"lacks {piece.file}, which has a part of '{name}'; copy the whole folder")
        with Path(files[piece.file]).open("rb") as file:
            file.seek(piece.start)
            content = file.read(piece.length)
        largest = _largest_record(content, piece.file)
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        # Not all versions of torch compare these, and would take the rest from what is in memory.
        if dense and value.untyped_storage().nbytes() > largest:
            raise CheckpointError(f"has less of '{name}' in {piece.file} than the part needs")
        if not dense or value.dtype != dtype or tuple(value.shape) != piece.shape:
            raise CheckpointError(f"has something else than a part of '{name}' in {piece.file}")
        where = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))
        if tuple(whole[where].shape) != piece.shape or seen[where].any():
            raise CheckpointError(f"has parts of '{name}' that lie on each other, or outside of its shape")
        whole[where], seen[where] = value, True
    if not seen.all():
        raise CheckpointError(f"lacks a part of '{name}'; copy the whole folder, of one save")
    return whole


def _largest_record(content: bytes, file: str) -> int:
    """The bytes of the largest storage in a piece, which is a file of torch.save; compressed ones may be bombs."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError(f"has compressed parts in {file}, as torch.distributed.checkpoint writes none")
    return max((record.file_size for record in records if "/data/" in record.filename), default=0)


def _piece(name: str, chunk: _StandIn, places: Mapping[tuple[str, tuple[int, ...]], _StandIn]) -> Piece:
    offset, shape = chunk.get("offsets"), chunk.get("sizes")
    info = places.get((name, offset))
    if info is None:
        raise CheckpointError(f"does not say where the part at {offset} of '{name}' is")
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"has '{name}' transformed (compressed or encrypted), which is not supported")
    return Piece(offset, shape, str(info.get("relative_path")), int(info.get("offset")), int(info.get("length")))


def _dtype(properties: _StandIn) -> str:
    """Properties are pickled as a tuple that begins with the dtype."""
    state = properties.state
    found = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    return str(found)
