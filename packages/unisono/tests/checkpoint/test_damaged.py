"""A checkpoint that was damaged is refused, naming what is damaged and what it belongs to."""

from __future__ import annotations

import importlib
import json
import marshal
import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from packages.unisono.tests.checkpoint.saved import FILES, STATE, Threads, load, save
from unisono.checkpoint.core import arrays, commit, manifest, verify
from unisono.checkpoint.core.commit import Snapshot
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import CheckpointError

HELD = {"rank-00000.safetensors": "model/weight", "rank-00001.safetensors": "optimizer/weight/step"}


def _refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        commit.open_checkpoint(path)
    return str(caught.value)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("fault", ["is missing", "is damaged: the content of", "is damaged: it has"])
def test_what_is_refused_names_the_file_and_an_array_in_it(of_two: Path, name: str, fault: str) -> None:
    file = of_two / name
    content = file.read_bytes()
    match fault:
        case "is missing":
            file.unlink()
        case "is damaged: the content of":
            at = commit.read_manifest(of_two).arrays[HELD[name]]["pieces"][0]["at"]
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        case _:
            file.write_bytes(content[:-1])
    refused = _refused(of_two)
    assert f"{file} {fault}" in refused
    assert f"'{HELD[name]}'" in refused
    assert f"Delete {of_two}" in refused


def test_every_damaged_byte_is_refused_by_the_name_of_what_it_belongs_to(of_two: Path) -> None:
    """All of them, of all files: the header, each array, and the manifest."""
    names = set()
    for name in FILES[:2]:
        content = (of_two / name).read_bytes()
        places = commit.read_manifest(of_two)
        for at in range(len(content)):
            (of_two / name).write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            (array,) = [
                array
                for array, told in places.arrays.items()
                for piece in told["pieces"]
                if piece["file"] == name and piece["at"] <= at < piece["at"] + piece["bytes"]
            ] or [""]
            told = f"the content of '{array}'" if array else "its header"
            assert f"{of_two / name} is damaged: {told} is not what was written" in _refused(of_two)
            names.add((name, array))
        (of_two / name).write_bytes(content)
    assert {array for _, array in names} == {"", "model/weight", "optimizer/weight/step"}
    content = (of_two / "manifest.json").read_bytes()
    for at in range(len(content)):
        for bit in (0x01, 0x20):  # the second makes capitals of letters
            (of_two / "manifest.json").write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            assert str(of_two) in _refused(of_two)
    (of_two / "manifest.json").write_bytes(content)
    commit.open_checkpoint(of_two)


def test_a_manifest_that_says_the_same_in_other_bytes_is_refused(of_two: Path) -> None:
    content = (of_two / "manifest.json").read_text()
    assert "\\u00e9" in content
    other = content.replace("\\u00e9", "\\u00E9")
    assert json.loads(other) == json.loads(content)
    (of_two / "manifest.json").write_text(other)
    assert "manifest.json is damaged" in _refused(of_two)


def test_what_a_manifest_holds_is_one_of_two_words(of_two: Path) -> None:
    """`unisono replay` quoted the word in an error, and with it the lines that it had."""
    content = json.loads((of_two / "manifest.json").read_text())
    del content["sha256"]
    (of_two / "manifest.json").write_bytes(manifest.encode({**content, "holds": "weights\nunisono: forged"}))
    said = _refused(of_two)
    assert "is not a manifest that can be used" in said and "'holds'" in said and "forged" not in said, said


def test_files_of_another_step_are_refused(tmp_path: Path) -> None:
    """Even if they have the same names, sizes and arrays, and even the same values."""
    same = [ArrayShard("model/weight", (3,), (0,), torch.ones(3))]
    one, other = (
        commit.save_checkpoint(tmp_path, Snapshot(step, same, STATE), SingleProcess(), keep=9) for step in (4, 6)
    )
    assert (one / FILES[0]).stat().st_size == (other / FILES[0]).stat().st_size
    shutil.copy(one / FILES[0], other / FILES[0])
    assert f"{other / FILES[0]} is damaged: its header" in _refused(other)
    shutil.copy(one / "manifest.json", tmp_path / "kept")
    shutil.copy(other / "manifest.json", one / "manifest.json")
    assert f"{one / 'manifest.json'} belongs to step 6, unlike its folder" in _refused(one)
    shutil.copy(tmp_path / "kept", one / "manifest.json")
    commit.open_checkpoint(one)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    original = json.loads((path / "manifest.json").read_text())
    del original["sha256"]

    def refused(old: str, new: str) -> str:
        content = json.loads(json.dumps(original).replace(old, new))
        (path / "manifest.json").write_bytes(manifest.encode(content))
        return _refused(path)

    for name in ("../step/x", "/etc/passwd", ".hidden", "a\\\\b", ""):
        assert "is not a valid file name" in refused(FILES[0], name), name
    assert "which it does not list" in refused(f'"file": "{FILES[0]}"', '"file": "other"')
    more = {"size": 9, "sha256": "", "header": {"size": 8, "sha256": ""}}
    assert "belong to no array" in refused('"files": {', f'"files": {{"more": {json.dumps(more)}, ')
    end = original["arrays"]["optimizer/weight/step"]["pieces"][0]["at"]
    assert "belong to no array" in refused(f'"at": {end}', f'"at": {end + 1}')
    assert "negative" in refused(f'"at": {end}', '"at": -1')
    (path / "manifest.json").write_bytes(manifest.encode(original))
    commit.open_checkpoint(path)


def _opened_together(place: ProcessInfo, group: Communicator, path: Path) -> tuple[str, list[tuple[str, str]]]:
    try:
        return "", sorted(commit.open_checkpoint(path, group).verified)
    except CheckpointError as error:
        return str(error), []


def _entries(path: Path) -> list[tuple[str, str]]:
    return sorted((p["file"], p["entry"]) for a in commit.read_manifest(path).arrays.values() for p in a["pieces"])


def test_ranks_of_one_host_hash_every_byte_once_and_all_of_them_know(
    of_two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, hashed = Threads(2), []

    def hash_of(file: Path, at: int, length: int) -> str | None:
        hashed.append((file.name, at, length))
        return arrays.hash_range(file, at, length)

    monkeypatch.setattr(verify, "hash_range", hash_of)
    results = group.run(lambda: _opened_together(ProcessInfo(), group, of_two))
    assert results == [("", _entries(of_two))] * 2
    size = sum(file["size"] for file in commit.read_manifest(of_two).files.values())
    assert sum(length for _, _, length in hashed) == size
    assert len(set(hashed)) == len(hashed)


def test_what_another_host_has_verified_is_not_known_here(of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Threads(2)
    for tells in (lambda folder: f"boot {group.rank}", lambda folder: None):
        monkeypatch.setattr(verify, "_file_cache_id", tells)
        (first, seen), (second, seen_there) = group.run(lambda: _opened_together(ProcessInfo(), group, of_two))
        assert not first + second
        assert sorted(seen + seen_there) == _entries(of_two), "a piece was verified by nobody, or twice"
        assert seen
        assert seen_there


def test_a_kernel_and_a_mounted_folder_are_what_ranks_of_one_host_share(of_two: Path) -> None:
    told = verify._file_cache_id(of_two)
    assert told is not None
    assert verify._file_cache_id(of_two) == told
    assert verify._file_cache_id(of_two.parent) != told
    assert verify._file_cache_id(of_two / "nowhere") is None


def test_ranks_share_the_verification_and_all_refuse_what_one_finds(of_two: Path) -> None:
    group = Threads(2)
    assert not any(fault for fault, _ in group.run(lambda: _opened_together(ProcessInfo(), group, of_two)))
    for name in FILES[:2]:
        content = (of_two / name).read_bytes()
        for at in (3, 20, len(content) - 1):
            (of_two / name).write_bytes(content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :])
            first, second = group.run(lambda: _opened_together(ProcessInfo(), group, of_two)[0])
            assert first == second
            assert f"{of_two / name} is damaged" in first
        (of_two / name).write_bytes(content)
    (of_two / "manifest.json").unlink()
    assert all(
        "manifest.json cannot be read" in fault
        for fault, _ in group.run(lambda: _opened_together(ProcessInfo(), group, of_two))
    )


@pytest.mark.parametrize("name", HELD)
def test_a_file_that_is_shorter_or_longer_is_refused(of_two: Path, name: str) -> None:
    content = (of_two / name).read_bytes()
    for other in (*(content[:size] for size in (0, 1, 8, 50, -1)), content + b"\0"):
        (of_two / name).write_bytes(other)
        assert str(of_two / name) in _refused(of_two)


def test_a_manifest_that_is_torn_anywhere_missing_or_something_else_is_refused(of_two: Path) -> None:
    file = of_two / "manifest.json"
    content = file.read_bytes()
    for size in range(0, len(content), 7):
        file.write_bytes(content[:size])
        assert f"{file} cannot be read" in _refused(of_two)
    for text in ("[]", "null", "{}", '"text"', '{"format": 2}', '{"format": 2, "sha256": ""}'):
        file.write_text(text)
        assert str(file) in _refused(of_two)
    file.unlink()
    assert str(file) in _refused(of_two)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_an_unknown_format_is_refused(tmp_path: Path, version: Any) -> None:
    with mock.patch.object(manifest, "FORMAT", version):
        path = save(tmp_path, 4)
    assert f"has checkpoint format {version}; this version reads 2" in _refused(path)


def test_nothing_is_unpickled(of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Poison:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            raise AssertionError("something was unpickled")

    commit.open_checkpoint(of_two)  # whatever is imported on the way is read by marshal
    made = pickle.dumps({"a": 1})
    torch.save({"a": torch.ones(1)}, of_two.parent / "pickled.pt")
    for module in (pickle, importlib.import_module("_pickle")):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, Poison)
    for name in ("load", "loads"):
        monkeypatch.setattr(marshal, name, Poison)
    monkeypatch.setattr(np, "load", Poison)
    with pytest.raises(AssertionError, match="unpickled"):  # it is not vacuous: what torch.load does falls into it
        torch.load(of_two.parent / "pickled.pt", weights_only=False)
    monkeypatch.setattr(torch, "load", Poison)
    for act in (lambda: pickle.loads(made), lambda: marshal.loads(b""), lambda: torch.load(of_two / "x")):
        with pytest.raises(AssertionError, match="unpickled"):
            act()
    group = Threads(2)
    for checkpoint in group.run(lambda: commit.open_checkpoint(of_two, group)):
        reader = checkpoint.reader()
        assert reader.read("model/weight", (0, 0), (4, 3)).shape == (4, 3)
        assert reader.read("optimizer/weight/step", (), ()) == 4
    assert load(of_two)["model/weight"].shape == (4, 3)
