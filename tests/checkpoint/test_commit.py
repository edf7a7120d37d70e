"""A checkpoint is whole or absent, whatever fails while it is written, and what is damaged afterwards is refused."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
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
from unisono.checkpoint import arrays, commit
from unisono.checkpoint.arrays import ArrayReader
from unisono.errors import CheckpointError
from unisono.place import Alone, Group, Place
from unisono.state import Shard

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
    return {name: reader.read(name, (0,) * len(shape), shape) for name, shape in reader.shapes.items()}


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
    manifest = json.loads((of_two / "manifest.json").read_text())
    assert manifest["files"] == {
        name: {
            "size": (of_two / name).stat().st_size,
            "sha256": hashlib.sha256((of_two / name).read_bytes()).hexdigest(),
        }
        for name in ("rank-00000.safetensors", "rank-00001.safetensors")
    }


def test_the_manifest_tells_where_every_array_lies(of_two: Path) -> None:
    manifest = json.loads((of_two / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["state"]) == (1, 4, STATE)
    weight = manifest["arrays"]["model/weight"]
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
    with pytest.raises(CheckpointError, match="could not finish the checkpoint"):
        save(tmp_path, 4, state={"the": "second"})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


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
@pytest.mark.parametrize("fault", ["is missing", "is damaged: its content", "is damaged: it has"])
def test_what_is_refused_names_the_file_and_an_array_in_it(of_two: Path, name: str, fault: str) -> None:
    file = of_two / name
    content = file.read_bytes()
    match fault:
        case "is missing":
            file.unlink()
        case "is damaged: its content":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case _:
            file.write_bytes(content[:-1])
    refused = _refused(of_two)
    assert f"{file} {fault}" in refused
    assert HELD[name] in refused
    assert f"Delete {of_two}" in refused


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


@pytest.mark.parametrize("content", ["[]", "null", "{}", '"text"', '{"format": 1}', '{"format": 1, "sha256": ""}'])
def test_a_manifest_that_is_something_else_is_refused(of_two: Path, content: str) -> None:
    (of_two / "manifest.json").write_text(content)
    assert str(of_two / "manifest.json") in _refused(of_two)


def test_a_missing_manifest_is_refused(of_two: Path) -> None:
    (of_two / "manifest.json").unlink()
    assert str(of_two / "manifest.json") in _refused(of_two)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_an_unknown_format_is_refused(tmp_path: Path, version: Any) -> None:
    with mock.patch.object(commit, "FORMAT", version):
        path = save(tmp_path, 4)
    assert f"has checkpoint format {version}; this version reads 1" in _refused(path)


def test_nothing_is_unpickled(of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poison(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("something was unpickled")

    for module in (pickle, importlib.import_module("_pickle")):
        for name in ("load", "loads", "Unpickler"):
            monkeypatch.setattr(module, name, poison)
    monkeypatch.setattr(torch, "load", poison)
    monkeypatch.setattr(np, "load", poison)
    with pytest.raises(AssertionError, match="unpickled"):
        pickle.loads(b"")
    assert load(of_two)["model/weight"].shape == (4, 3)


# what fails while saving --------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_told_with_its_rank_and_reason(tmp_path: Path) -> None:
    save(tmp_path, 2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")
    with (
        mock.patch.object(arrays, "write", side_effect=full),
        pytest.raises(
            CheckpointError, match=r"rank 0 could not write its part of the checkpoint: No space left .*some/file"
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
        with pytest.raises(CheckpointError, match=r"rank 0 could not write its part .*[Nn]o space left on device"):
            commit.save(disk, 4, large, STATE, Alone(), keep=1)
        assert steps(disk) == [2]
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
        told[f"{name}: steps"] = str(steps(folder))
        group.barrier("the next scenario")

    denied, full = PermissionError(13, "Permission denied"), OSError(28, "No space left on device")
    save(1)
    failing("write on 1", 2, arrays, "write", 1, full)
    failing("write on 0", 2, arrays, "write", 0, full)
    failing("flush on 1", 2, commit, "sync", 1, full)
    failing("sweep on 0", 2, shutil, "rmtree", 0, denied)
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
    "write on 1": "rank 1 could not write its part of the checkpoint: No space left on device",
    "write on 0": "rank 0 could not write its part of the checkpoint: No space left on device",
    "flush on 1": "rank 1 could not write its part of the checkpoint: No space left on device",
    "sweep on 0": "rank 0 could not make a folder for the checkpoint: Permission denied",
    "make on 0": "rank 0 could not make a folder for the checkpoint: Permission denied",
    "manifest on 0": "rank 0 could not finish the checkpoint: No space left on device",
    "rename on 0": "rank 0 could not finish the checkpoint: Permission denied",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_fails_all_and_is_named(failures: list[dict[str, str]], failure: str) -> None:
    for told in failures:
        assert FAILURES[failure] in told[failure]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_leaves_the_older_checkpoint(failures: list[dict[str, str]], failure: str) -> None:
    for told in failures:
        assert told[f"{failure}: steps"] == "[1]"


def test_a_save_after_failures_succeeds_and_is_seen_by_all_ranks(failures: list[dict[str, str]]) -> None:
    for told in failures:
        assert told["at last: steps"] == "[1, 3]"


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
