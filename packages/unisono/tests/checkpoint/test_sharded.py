"""Safetensors files written in blocks are what the library reads; an index that lies is refused before anything."""

from __future__ import annotations

import itertools
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from unisono.checkpoint.exchange import hf_shards
from unisono.checkpoint.exchange.hf_shards import CODES, ShardedFiles, TensorEntry, blocks, plan_files, write
from unisono.runtime.errors import CheckpointError
from unisono.runtime.files import atomic_folder

SHAPES = [(), (0,), (3,), (2, 0), (5, 3), (1, 1), (4, 3, 2)]


@pytest.mark.parametrize("limit", [1, 7, 64, 1 << 20])
def test_every_dtype_and_shape_comes_back_by_the_librarys_own_reader(
    tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {
        f"{code} {shape}": torch.randint(0, 2, shape).to(dtype) for dtype, code in CODES.items() for shape in SHAPES
    }
    entries = [TensorEntry(name, value.dtype, tuple(value.shape)) for name, value in made.items()]

    def content(entry: TensorEntry) -> Any:
        for offset, shape in blocks(entry.shape, entry.dtype.itemsize, limit):
            yield made[entry.name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    with (tmp_path / "a.safetensors").open("wb") as file:
        write(file, entries, content)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == made.keys()
    for name, value in made.items():
        assert found[name].dtype == value.dtype
        assert (
            found[name]
            .view(torch.uint8 if value.dim() else value.dtype)
            .equal(value.view(torch.uint8 if value.dim() else value.dtype))
        )
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    monkeypatch.setattr(hf_shards, "blocks", lambda shape, item, most=limit: blocks(shape, item, most))
    again = ShardedFiles(tmp_path / "a.safetensors")
    assert len(again.entries) == len(made)
    for entry in again.entries:
        parts = [part.reshape(-1) for part in again.content(entry)]
        assert torch.cat(parts).view(torch.uint8).equal(made[entry.name].reshape(-1).view(torch.uint8))


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([1, 2, 8]), st.integers(1, 40))
def test_blocks_cover_an_array_once_in_the_order_of_memory(shape: list[int], item: int, limit: int) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    parts = []
    for offset, size in blocks(tuple(shape), item, limit):
        part = whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        assert part.numel() * item <= max(limit, item)
        parts.append(part.reshape(-1))
    assert torch.equal(torch.cat(parts), whole.reshape(-1))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(1, 40))
def test_files_are_as_full_as_the_order_of_tensors_allows(sizes: list[int], limit: int) -> None:
    entries = [TensorEntry(str(n), torch.int8, (size,)) for n, size in enumerate(sizes)]
    files = plan_files(entries, limit)
    assert [entry for file in files for entry in file.entries] == entries
    assert all(file.size <= limit or len(file.entries) == 1 for file in files)
    for file, after in itertools.pairwise(files):
        assert file.size + after.entries[0].size > limit


# files of others ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3)}, folder / "two.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "outside.safetensors")
    point(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def point(folder: Path, where: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_a_folder_is_read_by_its_index_or_without_one(folder: Path) -> None:
    assert {entry.name for entry in ShardedFiles(folder).entries} == {"a", "b"}
    (folder / "model.safetensors.index.json").unlink()
    assert {entry.name for entry in ShardedFiles(folder).entries} == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("../outside.safetensors", "which lies outside"),
        ("../model/two.safetensors", "which lies outside"),
        ("/etc/passwd", "which lies outside"),
        ("..\\outside.safetensors", "which is not a valid file name"),
        ("two.safetensors\0", "which is not a valid file name"),
        ("", "which is not a valid file name"),
        ("ä" * 128, "which is not a valid file name"),
        (None, "should be a valid string"),
        (["two.safetensors"], "which is not a valid file name|cannot be read as an index"),
        ("three.safetensors", "three.safetensors is missing"),
        (".", "which is not a valid file name"),
        ("pipe", "is a pipe, not a file"),
        ("link.safetensors", "is a link to .*outside.safetensors; only files inside that folder"),
        ("sub/outside.safetensors", "model/sub is a link; only files inside that folder"),
    ],
)
def test_an_index_that_names_what_it_must_not_is_refused(folder: Path, name: Any, told: str) -> None:
    (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
    (folder / "sub").symlink_to(folder.parent)
    os.mkfifo(folder / "pipe")
    point(folder, {"a": "one.safetensors", "b": name})
    with pytest.raises(CheckpointError, match=told):
        ShardedFiles(folder)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, "says that one.safetensors has 'b', but it does not"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "has 'c', but it does not"),
        ([1], "cannot be read as an index of tensors"),
        ("text", "cannot be read as an index of tensors"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(folder: Path, where: Any, told: str) -> None:
    point(folder, where)
    with pytest.raises(CheckpointError, match=told):
        ShardedFiles(folder)


def test_a_tensor_that_the_index_does_not_know_or_that_is_there_twice_is_refused(folder: Path) -> None:
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"two.safetensors has 'c', which the index does not list"):
        ShardedFiles(folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"a": torch.ones(3)}, folder / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"one.safetensors and two.safetensors both have 'a'"):
        ShardedFiles(folder)


def test_an_index_of_another_kind_of_nesting_or_size_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read as an index"):
        ShardedFiles(folder)
    monkeypatch.setattr(hf_shards, "LARGEST_INDEX", 1000)
    with pytest.raises(CheckpointError, match="has 100000 bytes; at most 1000 bytes"):
        ShardedFiles(folder)


SAME = b'"dtype":"U8","shape":[4],"data_offsets":[0,4]}'  # the same bytes for two tensors


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"", 1 << 62),
        (b"{}", 200 << 20),
        (b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', None),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-8,-4]}}', None),
        (b'{"a":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,4]}}', None),
        (b'{"a":{' + SAME + b',"b":{' + SAME + b"}", 0),
        (b"not json", None),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes, length: int | None) -> None:
    length = length or len(header)
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", length) + header + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match=r"a.safetensors cannot be read as safetensors"):
        ShardedFiles(file)


# folders that are whole or not at all ---------------------------------------------------------------------------------


def test_a_tensor_that_torch_cannot_make_is_refused_in_one_line(tmp_path: Path) -> None:
    """The library reads any number of columns where there are no rows; torch ended in a TypeError and its own calls."""
    header = b'{"a": {"dtype": "F32", "shape": [0, 9223372036854775808], "data_offsets": [0, 0]}}'
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (entry,) = (files := ShardedFiles(tmp_path / "a.safetensors")).entries
    with pytest.raises(CheckpointError, match=r"'a' cannot be read: [^\n]*Overflow[^\n]{,60}$"):
        next(files.content(entry))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as temporary:
        (temporary / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(KeyError), atomic_folder(tmp_path / "other") as temporary:
        (temporary / "a").write_text("1")
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_never_replaces_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(FileExistsError), atomic_folder(tmp_path / name):
            pytest.fail("it begins")
    for name in ("folder", "meanwhile"):
        with pytest.raises(FileExistsError, match=name), atomic_folder(tmp_path / name) as temporary:
            (temporary / "a").write_text("mine")
            if name == "folder":
                (tmp_path / name).mkdir()
                (tmp_path / name / "a").write_text("precious")
            else:
                (tmp_path / name).write_text("precious")
    assert (tmp_path / "folder" / "a").read_text() == (tmp_path / "meanwhile").read_text() == "precious"
    assert not list(tmp_path.glob("*.writing"))
