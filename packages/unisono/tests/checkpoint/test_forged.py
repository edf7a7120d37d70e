"""A manifest that was written to deceive: what it leaves open is never filled with what was in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packages.unisono.tests.checkpoint.saved import save, shards
from unisono.checkpoint.core import commit, manifest
from unisono.engines.state import check_dtype
from unisono.engines.torch.state import saved_tensors
from unisono.runtime.errors import CheckpointError

boxes = st.lists(
    st.tuples(st.tuples(st.integers(0, 2), st.integers(0, 2)), st.tuples(st.integers(1, 3), st.integers(1, 3))),
    max_size=9,
)


def pieces_of(found: Any) -> list[dict[str, Any]]:
    return [{"offset": list(offset), "shape": list(shape)} for offset, shape in found]


@given(boxes)
def test_pieces_tile_an_array_exactly_or_are_refused(found: Any) -> None:
    """Compared with counting how often each element is covered."""
    whole = [3, 3]
    inside = [box for box in found if all(a + n <= 3 for a, n in zip(*box, strict=True))]
    covered = np.zeros(whole, dtype=int)
    for (row, column), (rows, columns) in inside:
        covered[row : row + rows, column : column + columns] += 1
    assert manifest._tile(pieces_of(inside), whole) is bool((covered == 1).all())


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_every_grid_of_pieces_is_accepted(whole: list[int], data: st.DataObject) -> None:
    cuts = [sorted({0, size, *data.draw(st.sets(st.integers(0, size)))}) for size in whole]
    grid = product(*(list(pairwise(edges)) for edges in cuts))
    found = [([a for a, _ in cell], [b - a for a, b in cell]) for cell in grid]
    assert manifest._tile(pieces_of(found), whole)
    if len(found) > 1:
        assert not manifest._tile(pieces_of(found[1:]), whole)
        assert not manifest._tile(pieces_of([found[0], *found[:-1]]), whole) or found[0] == found[-1]


def forge(path: Path, change: Callable[[dict[str, Any]], None], header: Callable[[Any], None] | None = None) -> None:
    """Change a manifest, and the header of its file, as whoever chose every byte would: all hashes fit."""
    file = path / "manifest.json"
    content = json.loads(file.read_bytes())
    content.pop("sha256")
    change(content)
    if header is not None:
        (name,) = content["files"]
        written = (path / name).read_bytes()
        length = content["files"][name]["header"]["size"]
        entries = json.loads(written[8:length])
        header(entries)
        text = json.dumps(entries, separators=(",", ":")).encode().ljust(length - 8)
        assert len(text) == length - 8
        (path / name).write_bytes(written[:8] + text + written[length:])
        content["files"][name]["header"]["sha256"] = sha256(written[:8] + text).hexdigest()
    file.write_bytes(manifest.encode(content))


def take_more(array: dict[str, Any]) -> None:
    array["shape"] = [4, 3]


def take_the_first_row_twice(array: dict[str, Any]) -> None:
    (piece,) = array["pieces"]
    half = {**piece, "shape": [1, 3], "bytes": piece["bytes"] // 2}
    array["pieces"] = [half, {**half, "at": piece["at"] + half["bytes"]}]


@pytest.mark.parametrize("change", [take_more, take_the_first_row_twice])
def test_a_manifest_whose_pieces_overlap_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The elements that no piece has were read from this process's memory, and exported; each byte has its piece."""
    path = save(tmp_path, 4)
    forge(path, lambda content: change(content["arrays"]["model/weight"]))
    with pytest.raises(CheckpointError, match="the pieces of 'model/weight' overlap or leave elements out"):
        commit.open_checkpoint(path)


def test_what_a_file_says_of_its_arrays_is_what_the_manifest_says(tmp_path: Path) -> None:
    """Bytes of float32 that a manifest declared int32 were loaded, as numbers of a thousand million."""
    path = save(tmp_path, 4)

    def declare(content: dict[str, Any]) -> None:
        content["arrays"]["model/weight"]["dtype"] = "int32"

    forge(path, declare)
    with pytest.raises(CheckpointError, match=r"'model/weight@0,0' is F32 \[2, 3\], and int32 \[2, 3\] there"):
        commit.open_checkpoint(path)


def test_numbers_of_another_kind_than_the_model_s_are_refused(tmp_path: Path) -> None:
    """The same where the file's header lies as well."""
    path = save(tmp_path, 4)
    forge(
        path,
        lambda content: content["arrays"]["model/weight"].update(dtype="int32"),
        lambda entries: entries["model/weight@0,0"].update(dtype="I32"),
    )
    reader = commit.open_checkpoint(path).reader()
    with pytest.raises(CheckpointError, match="'model/weight' is int32 in the checkpoint and float32 in the model"):
        saved_tensors.read_into(reader, "model/weight", (0, 0), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("saved", "mine", "fits"),
    [
        ("float32", "bfloat16", True), ("bfloat16", "float64", True), ("float8_e4m3fn", "float32", True),
        ("int64", "int32", True), ("int32", "float32", False), ("bool", "uint8", False), ("uint8", "int8", False),
        ("complex64", "float32", False), ("float32", "complex64", False), ("complex64", "complex128", True),
    ],
)  # fmt: skip
def test_only_a_conversion_that_was_asked_for_happens(saved: str, mine: str, fits: bool) -> None:
    from unisono.engines import host_arrays

    if fits:
        check_dtype("a", host_arrays.parse_dtype(saved), mine)
    else:
        with pytest.raises(CheckpointError, match=f"'a' is {saved} in the checkpoint and {mine} in the model"):
            check_dtype("a", host_arrays.parse_dtype(saved), mine)


@pytest.mark.parametrize("dtype", ["03i4", "f4,03i4", "f4,i4", "object", "finfo", "U1"])
def test_a_dtype_that_is_none_of_numbers_is_refused(tmp_path: Path, dtype: str) -> None:
    """NumPy evaluates a list of names as Python: the first two were a SyntaxError (found by the fuzzer)."""
    path = save(tmp_path, 4)
    forge(path, lambda content: content["arrays"]["model/weight"].update(dtype=dtype))
    with pytest.raises(CheckpointError, match=f"'model/weight' has the unknown dtype '{dtype}'"):
        commit.open_checkpoint(path)


def test_a_checkpoint_of_many_empty_pieces_is_refused(tmp_path: Path) -> None:
    """400,000 of them took memory and time; none is ever written."""
    path = save(tmp_path, 4)

    def empty(content: dict[str, Any]) -> None:
        array = content["arrays"]["model/weight"]
        array["pieces"].append({**array["pieces"][0], "shape": [0, 3], "bytes": 0})

    forge(path, empty)
    with pytest.raises(CheckpointError, match="a piece of 'model/weight'"):
        commit.open_checkpoint(path)


def test_an_honest_checkpoint_is_read_as_before(tmp_path: Path) -> None:
    reader = commit.open_checkpoint(save(tmp_path, 4)).reader()
    for shard in shards(4):
        assert torch.equal(saved_tensors.read_tensor(reader, shard.name, shard.offset, shard.shape), shard.data)
