"""A checkpoint is whole or absent, whatever fails while it is written, and what is damaged afterwards is refused."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import marshal
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import processes
from unisono.checkpoint.core import arrays, commit, manifest, verify
from unisono.checkpoint.core.arrays import ArrayReader
from unisono.checkpoint.core.retention import Retention
from unisono.engines.state import Shard
from unisono.engines.torch import saved_tensors
from unisono.runtime.communicator import Alone, Group, Place
from unisono.runtime.errors import CheckpointError, NonFiniteError, SaveError

STATE = {"step": 4, "random": False, "micro_batch": 3, "nested": {"list": [1, 2.5, None], "text": "é"}}


def shards(step: int, rank: int = 0, size: int = 1) -> list[Shard]:
    """A rank's pieces of a state that says which step it is of: rows of a matrix, and on the last rank a scalar."""
    rows = torch.full((2, 3), float(step)) + torch.arange(3) / 10
    mine = [Shard("model/weight", (2 * size, 3), (2 * rank, 0), rows)]
    return mine + ([Shard("optimizer/weight/step", (), (), torch.tensor(step))] if rank == size - 1 else [])


def save(folder: Path, step: int, keep: int = 10, state: Any = None) -> Path:
    return commit.save(folder, step, shards(step), STATE if state is None else state, Alone(), keep)


def load(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = commit.open_(path)
    reader = ArrayReader(checkpoint.path, checkpoint.arrays)
    return {name: saved_tensors.read(reader, name, (0,) * len(shape), shape) for name, shape in reader.shapes.items()}


def is_of(path: Path, step: int) -> bool:
    """Whether a checkpoint is whole, and holds what was saved at a step."""
    found = load(path)
    return commit.open_(path).step == step and all(torch.equal(found[shard.name], shard.data) for shard in shards(step))


def steps(folder: Path) -> list[int]:
    return [commit.open_(path).step for path in commit.find(folder)]


class Threads:
    """The group of so many threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)
        self._own = threading.local()

    @property
    def rank(self) -> int:
        rank: int = self._own.rank
        return rank

    def gather(self, value: Any, what: str) -> list[Any]:
        self._values[self.rank] = json.loads(json.dumps(value))
        self._barrier.wait()
        everyone = list(self._values)
        self._barrier.wait()
        return everyone

    def barrier(self, what: str) -> None:
        self.gather(None, what)

    def run(self, act: Callable[[], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def enter(rank: int) -> None:
            self._own.rank = rank
            results[rank] = act()

        threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture
def of_two(tmp_path: Path) -> Path:
    """A checkpoint of step 4, written by two ranks."""
    group = Threads(2)
    first, second = group.run(lambda: commit.save(tmp_path / "two", 4, shards(4, group.rank, 2), STATE, group, keep=2))
    assert first == second
    return Path(first)


# what lies on the disk ----------------------------------------------------------------------------------------------


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    assert is_of(save(tmp_path, 4), 4)


def test_the_pieces_of_all_ranks_make_one_array(of_two: Path) -> None:
    whole = torch.cat([shards(4, rank, 2)[0].data for rank in range(2)])
    assert torch.equal(load(of_two)["model/weight"], whole)


def test_the_state_comes_back_as_it_was(tmp_path: Path) -> None:
    assert commit.open_(save(tmp_path, 4)).state == STATE


def test_a_checkpoint_is_a_folder_named_by_its_step(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 1234)
    assert path == tmp_path / "checkpoints" / "step-00001234"
    assert path.is_dir()


def test_a_checkpoint_holds_one_file_per_rank_and_the_manifest(of_two: Path) -> None:
    assert {file.name for file in of_two.iterdir()} == {
        "rank-00000.safetensors", "rank-00001.safetensors", "manifest.json",
    }  # fmt: skip


def test_a_rank_without_pieces_writes_no_file(tmp_path: Path) -> None:
    group = Threads(2)
    path = group.run(lambda: commit.save(tmp_path, 4, [] if group.rank else shards(4), STATE, group, keep=2))[0]
    assert {file.name for file in path.iterdir()} == {"rank-00000.safetensors", "manifest.json"}
    assert is_of(path, 4)


def test_the_manifest_tells_sizes_and_hashes_of_all_files(of_two: Path) -> None:
    files = json.loads((of_two / "manifest.json").read_text())["files"]
    assert files.keys() == {"rank-00000.safetensors", "rank-00001.safetensors"}
    for name, told in files.items():
        content = (of_two / name).read_bytes()
        assert (told["size"], told["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_the_manifest_tells_where_every_array_lies(of_two: Path) -> None:
    content = json.loads((of_two / "manifest.json").read_text())
    assert (content["format"], content["step"], content["state"]) == (2, 4, STATE)
    weight = content["arrays"]["model/weight"]
    assert (weight["shape"], weight["dtype"]) == ([4, 3], "float32")
    assert [(piece["file"], piece["offset"], piece["shape"]) for piece in weight["pieces"]] == [
        ("rank-00000.safetensors", [0, 0], [2, 3]),
        ("rank-00001.safetensors", [2, 0], [2, 3]),
    ]


def test_nothing_but_the_checkpoint_remains_in_its_folder(tmp_path: Path) -> None:
    save(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


# what is found ------------------------------------------------------------------------------------------------------


def test_checkpoints_are_found_the_oldest_first(tmp_path: Path) -> None:
    for step in (7, 100_000_000, 99_999_999, 20):
        save(tmp_path, step)
    assert steps(tmp_path) == [7, 20, 99_999_999, 100_000_000]


def test_nothing_is_found_where_there_is_no_folder(tmp_path: Path) -> None:
    assert commit.find(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("name", [".writing-step-00000009", "step-9", "step-00000009.old", "step-0000000x", "other"])
def test_a_folder_of_another_name_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    shutil.copytree(save(tmp_path, 4), tmp_path / name)
    assert steps(tmp_path) == [4]


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 4)
    (shutil.copytree(save(tmp_path, 5), tmp_path / "step-00000009") / "manifest.json").unlink()
    assert steps(tmp_path) == [4, 5]


def _interrupted(folder: Path, step: int) -> Path:
    """What a save leaves that was interrupted after it had written everything but the manifest."""
    with mock.patch.object(commit, "_write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        save(folder, step)
    (left,) = folder.glob(".*")
    assert (left / "rank-00000.safetensors").is_file()
    return left


def test_what_an_interrupted_save_left_is_not_found(tmp_path: Path) -> None:
    save(tmp_path, 4)
    _interrupted(tmp_path, 5)
    assert steps(tmp_path) == [4]


@pytest.mark.parametrize("step", [5, 6])
def test_what_an_interrupted_save_left_is_swept_by_the_next(tmp_path: Path, step: int) -> None:
    left = _interrupted(tmp_path, 5)
    assert is_of(save(tmp_path, step), step)
    assert not left.exists()


# which remain -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_was_moved_behind_a_link_goes_as_a_link_and_its_content_stays(tmp_path: Path) -> None:
    runs, archive = tmp_path / "runs", tmp_path / "archive"
    save(runs, 2)
    (runs / "step-00000002").rename(archive)
    (runs / "step-00000002").symlink_to(archive)
    assert steps(runs) == [2] and is_of(runs / "step-00000002", 2), "it is still read where it is named"
    for step in (4, 6, 8):
        save(runs, step, keep=1)
    assert steps(runs) == [8]
    assert sorted(path.name for path in runs.iterdir()) == ["step-00000008"]
    assert is_of(archive, 2)


def test_what_cannot_be_swept_is_reported_and_ends_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _interrupted(tmp_path, 2)
    with mock.patch("shutil.rmtree", side_effect=PermissionError(errno.EPERM, "Operation not permitted")):
        save(tmp_path, 4)
    assert steps(tmp_path) == [4]
    assert "was left by an interrupted save and cannot be removed" in caplog.text


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_remain(tmp_path: Path, keep: int) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep)
    assert steps(tmp_path) == [2, 4, 6, 8][-keep:]
    assert len(list(tmp_path.iterdir())) == keep


def test_older_checkpoints_go_only_after_the_new_one_is_there(tmp_path: Path) -> None:
    save(tmp_path, 2)
    removed: list[list[int]] = []
    remove = shutil.rmtree

    def watched(path: Path) -> None:
        removed.append(steps(tmp_path))
        remove(path)

    with mock.patch.object(shutil, "rmtree", watched):
        save(tmp_path, 4, keep=1)
    assert removed == [[4]]


def test_an_old_checkpoint_that_is_half_removed_is_not_found(tmp_path: Path) -> None:
    save(tmp_path, 2)

    def interrupted(path: Path) -> None:
        (path / "rank-00000.safetensors").unlink()
        raise KeyboardInterrupt

    with mock.patch.object(shutil, "rmtree", interrupted), pytest.raises(KeyboardInterrupt):
        save(tmp_path, 4, keep=1)
    assert steps(tmp_path) == [4]
    save(tmp_path, 6, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, 4, state={"the": "first"})
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(SaveError, match="step-00000004 is there and whole, and a checkpoint is never overwritten"):
        save(tmp_path, 4, state={"the": "second"})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_the_parent_is_the_checkpoint_before(tmp_path: Path) -> None:
    for step in (2, 4, 8):
        save(tmp_path, step)
    commit.save(tmp_path, 6, shards(6), STATE, Alone(), keep=9)
    commit.save(tmp_path, 9, shards(9), STATE, Alone(), keep=9, parent="step-00000006")
    parents = {commit.read(path).step: commit.read(path).parent for path in commit.find(tmp_path)}
    assert parents == {2: None, 4: "step-00000002", 6: "step-00000004", 8: "step-00000004", 9: "step-00000006"}


def test_what_made_it_what_it_holds_and_how_good_it_is_comes_back(tmp_path: Path) -> None:
    about, metric = {"config": {"a": [1, None]}, "layout": {}}, {"loss": 0.1, "worst": float("inf")}
    path = commit.save(tmp_path, 4, shards(4), STATE, Alone(), 1, about=about, metric=metric, holds="model")
    checkpoint = commit.open_(path)
    assert (checkpoint.about, checkpoint.metric, checkpoint.holds) == (about, metric, "model")
    plain = commit.open_(save(tmp_path, 5))
    assert (plain.about, plain.metric, plain.holds) == ({}, None, "everything")


def test_a_damaged_checkpoint_of_the_same_step_is_kept_aside(tmp_path: Path) -> None:
    """The trainer comes to a step again after it went on from an older checkpoint."""
    contents = []
    for number in range(3):
        path = save(tmp_path, 4, state={"number": number})
        damaged = bytearray((path / FILES[0]).read_bytes())
        damaged[-1] ^= 1
        (path / FILES[0]).write_bytes(damaged)
        contents.append({file.name: file.read_bytes() for file in path.iterdir()})
    assert commit.open_(save(tmp_path, 6)).step == 6
    names = ["damaged-step-00000004", "damaged-step-00000004-1"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, "step-00000004", "step-00000006"]
    for name, content in zip(names, contents, strict=False):
        assert {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} == content


def test_what_fails_while_a_damaged_checkpoint_is_replaced_leaves_it(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    (path / FILES[0]).write_bytes(b"")
    with mock.patch.object(commit, "_write", side_effect=OSError(5, "Input/output error")), pytest.raises(SaveError):
        save(tmp_path, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_checkpoints_of_a_course_that_was_left_take_nobodys_place(tmp_path: Path) -> None:
    for step in (4, 6, 8):
        save(tmp_path, step)
    save(tmp_path, 5, keep=1)  # the run went on from 4
    assert steps(tmp_path) == [5, 6, 8]


def test_a_checkpoint_that_cannot_be_read_takes_nobodys_place(tmp_path: Path) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000004" / "manifest.json").write_text("{")
    save(tmp_path, 6, keep=2)
    assert [path.name for path in commit.find(tmp_path)] == ["step-00000002", "step-00000004", "step-00000006"]


def test_every_nth_and_the_best_remain_too(tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 3.0, 6: None, 7: 4.0}
    for step, loss in losses.items():
        metric = None if loss is None else {"loss": loss}
        retention = Retention(1, every=5, best="loss")
        commit.save(tmp_path, step, shards(step), STATE, Alone(), retention, metric=metric)
    assert steps(tmp_path) == [2, 5, 7]


def test_what_cannot_be_removed_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 2)
    with mock.patch.object(shutil, "rmtree", side_effect=PermissionError(13, "Permission denied")):
        assert is_of(save(tmp_path, 4, keep=1), 4)
    assert "step-00000002 could not be removed" in caplog.text


# what is refused ----------------------------------------------------------------------------------------------------

FILES = ("rank-00000.safetensors", "rank-00001.safetensors", "manifest.json")
HELD = {"rank-00000.safetensors": "model/weight", "rank-00001.safetensors": "optimizer/weight/step"}


def _refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        commit.open_(path)
    return str(caught.value)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_in_any_file_is_refused_by_name(of_two: Path, name: str, at: int, bit: int) -> None:
    content = (of_two / name).read_bytes()
    damaged = bytearray(content)
    damaged[at % len(content)] ^= 1 << bit
    (of_two / name).write_bytes(damaged)
    try:
        refused = _refused(of_two)
        assert str(of_two) in refused if "checkpoint format" in refused else str(of_two / name) in refused
    finally:
        (of_two / name).write_bytes(content)


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("fault", ["is missing", "is damaged: the content of", "is damaged: it has"])
def test_what_is_refused_names_the_file_and_an_array_in_it(of_two: Path, name: str, fault: str) -> None:
    file = of_two / name
    content = file.read_bytes()
    match fault:
        case "is missing":
            file.unlink()
        case "is damaged: the content of":
            at = commit.read(of_two).arrays[HELD[name]]["pieces"][0]["at"]
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
        places = commit.read(of_two)
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
    commit.open_(of_two)


def test_a_manifest_that_says_the_same_in_other_bytes_is_refused(of_two: Path) -> None:
    content = (of_two / "manifest.json").read_text()
    assert "\\u00e9" in content
    other = content.replace("\\u00e9", "\\u00E9")
    assert json.loads(other) == json.loads(content)
    (of_two / "manifest.json").write_text(other)
    assert "manifest.json is damaged" in _refused(of_two)


def test_files_of_another_step_are_refused(tmp_path: Path) -> None:
    """Even if they have the same names, sizes and arrays, and even the same values."""
    same = [Shard("model/weight", (3,), (0,), torch.ones(3))]
    one, other = (commit.save(tmp_path, step, same, STATE, Alone(), keep=9) for step in (4, 6))
    assert (one / FILES[0]).stat().st_size == (other / FILES[0]).stat().st_size
    shutil.copy(one / FILES[0], other / FILES[0])
    assert f"{other / FILES[0]} is damaged: its header" in _refused(other)
    shutil.copy(one / "manifest.json", tmp_path / "kept")
    shutil.copy(other / "manifest.json", one / "manifest.json")
    assert f"{one / 'manifest.json'} is of step 6, not of its folder's" in _refused(one)
    shutil.copy(tmp_path / "kept", one / "manifest.json")
    commit.open_(one)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 4)
    original = json.loads((path / "manifest.json").read_text())
    del original["sha256"]

    def refused(old: str, new: str) -> str:
        content = json.loads(json.dumps(original).replace(old, new))
        (path / "manifest.json").write_bytes(manifest.dumps(content))
        return _refused(path)

    for name in ("../step/x", "/etc/passwd", ".hidden", "a\\\\b", ""):
        assert "cannot be the name of a file" in refused(FILES[0], name), name
    assert "no file of it" in refused(f'"file": "{FILES[0]}"', '"file": "other"')
    assert "belong to nothing" in refused('"files": {', '"files": {"more": {"size": 9, "header": {"size": 8}}, ')
    end = original["arrays"]["optimizer/weight/step"]["pieces"][0]["at"]
    assert "belong to nothing" in refused(f'"at": {end}', f'"at": {end + 1}')
    assert "negative" in refused(f'"at": {end}', '"at": -1')
    (path / "manifest.json").write_bytes(manifest.dumps(original))
    commit.open_(path)


def _opened_together(place: Place, group: Group, path: Path) -> tuple[str, list[tuple[str, str]]]:
    try:
        return "", sorted(commit.open_(path, group).verified)
    except CheckpointError as error:
        return str(error), []


def _entries(path: Path) -> list[tuple[str, str]]:
    return sorted((p["file"], p["entry"]) for a in commit.read(path).arrays.values() for p in a["pieces"])


def test_ranks_of_one_host_hash_every_byte_once_and_all_of_them_know(
    of_two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, hashed = Threads(2), []

    def hash_of(file: Path, at: int, length: int) -> str | None:
        hashed.append((file.name, at, length))
        return arrays.hash_of(file, at, length)

    monkeypatch.setattr(verify, "hash_of", hash_of)
    results = group.run(lambda: _opened_together(Place(), group, of_two))
    assert results == [("", _entries(of_two))] * 2
    size = sum(file["size"] for file in commit.read(of_two).files.values())
    assert sum(length for _, _, length in hashed) == size
    assert len(set(hashed)) == len(hashed)


def test_what_another_host_has_verified_is_not_known_here(of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Threads(2)
    for tells in (lambda folder: f"boot {group.rank}", lambda folder: None):
        monkeypatch.setattr(verify, "_seen_by", tells)
        (first, seen), (second, seen_there) = group.run(lambda: _opened_together(Place(), group, of_two))
        assert not first + second
        assert sorted(seen + seen_there) == _entries(of_two), "a piece was verified by nobody, or twice"
        assert seen
        assert seen_there


def test_a_kernel_and_a_mounted_folder_are_what_ranks_of_one_host_share(of_two: Path) -> None:
    told = verify._seen_by(of_two)
    assert told is not None
    assert verify._seen_by(of_two) == told
    assert verify._seen_by(of_two.parent) != told
    assert verify._seen_by(of_two / "nowhere") is None


def test_ranks_share_the_verification_and_all_refuse_what_one_finds(of_two: Path) -> None:
    group = Threads(2)
    assert not any(fault for fault, _ in group.run(lambda: _opened_together(Place(), group, of_two)))
    for name in FILES[:2]:
        content = (of_two / name).read_bytes()
        for at in (3, 20, len(content) - 1):
            (of_two / name).write_bytes(content[:at] + bytes([content[at] ^ 2]) + content[at + 1 :])
            first, second = group.run(lambda: _opened_together(Place(), group, of_two)[0])
            assert first == second
            assert f"{of_two / name} is damaged" in first
        (of_two / name).write_bytes(content)
    (of_two / "manifest.json").unlink()
    assert all(
        "manifest.json cannot be read" in fault
        for fault, _ in group.run(lambda: _opened_together(Place(), group, of_two))
    )


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("size", [0, 1, 8, 50, -1])
def test_a_truncated_file_is_refused(of_two: Path, name: str, size: int) -> None:
    (of_two / name).write_bytes((of_two / name).read_bytes()[:size])
    assert str(of_two / name) in _refused(of_two)


def test_a_file_with_more_at_its_end_is_refused(of_two: Path) -> None:
    with (of_two / FILES[0]).open("ab") as file:
        file.write(b"\0")
    assert str(of_two / FILES[0]) in _refused(of_two)


def test_a_manifest_torn_anywhere_is_refused(of_two: Path) -> None:
    content = (of_two / "manifest.json").read_bytes()
    for size in range(0, len(content), 7):
        (of_two / "manifest.json").write_bytes(content[:size])
        assert f"{of_two / 'manifest.json'} cannot be read" in _refused(of_two)


@pytest.mark.parametrize("content", ["[]", "null", "{}", '"text"', '{"format": 2}', '{"format": 2, "sha256": ""}'])
def test_a_manifest_that_is_something_else_is_refused(of_two: Path, content: str) -> None:
    (of_two / "manifest.json").write_text(content)
    assert str(of_two / "manifest.json") in _refused(of_two)


def test_a_missing_manifest_is_refused(of_two: Path) -> None:
    (of_two / "manifest.json").unlink()
    assert str(of_two / "manifest.json") in _refused(of_two)


@pytest.mark.parametrize("version", [0, 1, 3, "2", None])
def test_an_unknown_format_is_refused(tmp_path: Path, version: Any) -> None:
    with mock.patch.object(manifest, "FORMAT", version):
        path = save(tmp_path, 4)
    assert f"has checkpoint format {version}; this version reads 2" in _refused(path)


def test_nothing_is_unpickled(of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Poison:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            raise AssertionError("something was unpickled")

    commit.open_(of_two)  # whatever is imported on the way is read by marshal
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
    for checkpoint in group.run(lambda: commit.open_(of_two, group)):
        reader = checkpoint.reader()
        assert reader.read("model/weight", (0, 0), (4, 3)).shape == (4, 3)
        assert reader.read("optimizer/weight/step", (), ()) == 4
    assert load(of_two)["model/weight"].shape == (4, 3)


# what fails while saving --------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_told_with_its_rank_and_reason(tmp_path: Path) -> None:
    save(tmp_path, 2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")
    with (
        mock.patch.object(arrays, "write", side_effect=full),
        pytest.raises(
            SaveError,
            match=r"rank 0 could not write its part of the checkpoint: no space left: needs 0.00 MB, .* free at",
        ),
    ):
        save(tmp_path, 4)
    assert steps(tmp_path) == [2]


@contextmanager
def _small_disk(at: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    at.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(at)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def test_a_full_disk_fails_the_save_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk") as disk:
        save(disk, 2)
        large = [Shard("model/weight", (2**20,), (0,), torch.ones(2**20))]
        with pytest.raises(SaveError, match=r"no space left: needs 4.19 MB, 1.0\d MB free at ") as caught:
            commit.save(disk, 4, large, STATE, Alone(), keep=1)
        assert str(disk) in str(caught.value)
        assert caught.value.exit_code == 7
        assert steps(disk) == [2]
        assert [path.name for path in disk.iterdir()] == ["step-00000002"], "the fragment is still there"
        assert is_of(commit.find(disk)[-1], 2)
        assert is_of(save(disk, 6, keep=1), 6)


def _with_failures(place: Place, group: Group, folder: Path) -> dict[str, str]:
    """Saves that fail on one of two ranks in different ways; returns what this rank was told."""
    told: dict[str, str] = {}

    def save(step: int) -> None:
        commit.save(folder, step, shards(step, place.rank, 2), STATE, group, keep=5)

    def failing(name: str, step: int, target: Any, attribute: str, rank: int, error: Exception) -> None:
        def fail(*arguments: Any, **more: Any) -> Any:
            raise error

        patch = mock.patch.object(target, attribute, fail if place.rank == rank else getattr(target, attribute))
        try:
            with patch:
                save(step)
            told[name] = ""
        except CheckpointError as caught:
            told[name] = str(caught)
        group.barrier("rank 0 to clean up")
        told[f"{name}: steps"] = str(steps(folder))
        told[f"{name}: left"] = str([path.name for path in folder.glob(".*")])
        group.barrier("the next scenario")

    denied, full = PermissionError(13, "Permission denied"), OSError(28, "No space left on device")
    save(1)
    failing("write on 1", 2, arrays, "write", 1, full)
    failing("write on 0", 2, arrays, "write", 0, full)
    failing("flush on 1", 2, os, "fsync", 1, full)
    failing("bug on 1", 2, arrays, "write", 1, RuntimeError("something of ours"))
    failing("make on 0", 2, Path, "mkdir", 0, denied)
    failing("manifest on 0", 2, commit, "_write", 0, full)
    failing("rename on 0", 2, Path, "rename", 0, denied)
    save(3)
    told["at last: steps"] = str(steps(folder))
    return told


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return processes.run(_with_failures, 2, tmp_path_factory.mktemp("failures"), timeout=120)


FAILURES = {
    "write on 1": "rank 1 could not write its part of the checkpoint: no space left: needs 0.00 MB, ",
    "write on 0": "rank 0 could not write its part of the checkpoint: no space left: needs 0.00 MB, ",
    "flush on 1": "rank 1 could not write its part of the checkpoint: no space left: needs 0.00 MB, ",
    "bug on 1": "rank 1 could not write its part of the checkpoint: RuntimeError: something of ours",
    "make on 0": "rank 0 could not make a folder for the checkpoint: Permission denied",
    "manifest on 0": "rank 0 could not finish the checkpoint: no space left: needs 0.00 MB, ",
    "rename on 0": "rank 0 could not finish the checkpoint: Permission denied",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_fails_all_and_is_named(failures: list[dict[str, str]], failure: str) -> None:
    for told in failures:
        assert FAILURES[failure] in told[failure]


def test_a_failure_leaves_no_fragment(failures: list[dict[str, str]]) -> None:
    for told in failures:
        for name in FAILURES:
            assert told[f"{name}: left"] == "[]", name


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_leaves_the_older_checkpoint(failures: list[dict[str, str]], failure: str) -> None:
    for told in failures:
        assert told[f"{failure}: steps"] == "[1]"


def test_a_save_after_failures_succeeds_and_is_seen_by_all_ranks(failures: list[dict[str, str]]) -> None:
    for told in failures:
        assert told["at last: steps"] == "[1, 3]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_a_state_that_is_not_finite_is_not_saved_on_any_rank(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    commit.save(tmp_path, 2, shards(2), STATE, Alone(), keep=2)
    moment = torch.ones(4).to(dtype)
    moment[2] = value
    group = Threads(2)

    def attempt(finite: bool) -> str:
        own = [Shard("optimizer/w/exp_avg", (4,), (0,), moment if group.rank else torch.ones(4), finite)]
        own[0] = Shard(
            f"{own[0].name}_{group.rank}", *(getattr(own[0], n) for n in ("shape", "offset", "data", "finite"))
        )
        try:
            commit.save(tmp_path, 4, own, STATE, group, keep=2)
        except NonFiniteError as error:
            assert error.exit_code == 3
            return str(error)
        return ""

    refused = group.run(lambda: attempt(True))
    assert len(set(refused)) == 1
    assert (
        "the state after step 4 holds numbers that are not finite (rank 1: 'optimizer/w/exp_avg_1' (1 of " in refused[0]
    )
    assert steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert group.run(lambda: attempt(False)) == ["", ""], "a mask may hold them"


# what is killed -----------------------------------------------------------------------------------------------------


def _pieces(step: int) -> list[Shard]:
    return [Shard(f"model/{name}", (2**15,), (0,), torch.full((2**15,), float(step))) for name in "abcd"]


def _save_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        commit.save(folder, step, _pieces(step), {"step": step}, Alone(), keep=2)


def test_a_process_killed_while_saving_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, not once per process
    rng, newest, interrupted = random.Random(0), 0, 0
    for _ in range(12):
        process = context.Process(target=_save_for_ever, args=(tmp_path, newest), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while not (tmp_path / f"step-{newest + 1:08d}").exists():
            assert time.monotonic() < deadline, "nothing was saved"
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.join()
        interrupted += any(tmp_path.glob(".writing-*"))
        found = commit.find(tmp_path)
        assert found
        for path in found:
            step = commit.open_(path).step
            assert all(torch.equal(array, _pieces(step)[0].data) for array in load(path).values())
        assert step > newest
        newest = step
    assert interrupted, "no kill fell into a save"


def test_a_whole_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    for step in (3, 6):
        commit.save(tmp_path, step, [], {"step": step}, Alone(), 5)
    shutil.rmtree(tmp_path / "step-00000006")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000006")
    assert commit.open_(tmp_path / "step-00000003").step == 3
    with pytest.raises(CheckpointError, match=r"step-00000006/manifest\.json is of step 3, not of its folder's"):
        commit.open_(tmp_path / "step-00000006")
