"""A save that fails or is killed leaves whole checkpoints only, and every rank is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from packages.unisono.tests import processes
from packages.unisono.tests.checkpoint.saved import STATE, Threads, is_of, load, save, shards, steps
from unisono.checkpoint.core import arrays, commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import CheckpointError, NonFiniteError, SaveError


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
        large = [ArrayShard("model/weight", (2**20,), (0,), torch.ones(2**20))]
        with pytest.raises(SaveError, match=r"no space left: needs 4.19 MB, 1.0\d MB free at ") as caught:
            commit.save_checkpoint(disk, Snapshot(4, large, STATE), SingleProcess(), keep=1)
        assert str(disk) in str(caught.value)
        assert caught.value.exit_code == 7
        assert steps(disk) == [2]
        assert [path.name for path in disk.iterdir()] == ["step-00000002"], "the fragment is still there"
        assert is_of(commit.find_checkpoints(disk)[-1], 2)
        assert is_of(save(disk, 6, keep=1), 6)


def _with_failures(place: ProcessInfo, group: Communicator, folder: Path) -> dict[str, str]:
    """Saves that fail on one of two ranks in different ways; returns what this rank was told."""
    told: dict[str, str] = {}

    def save(step: int) -> None:
        commit.save_checkpoint(folder, Snapshot(step, shards(step, place.rank, 2), STATE), group, keep=5)

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
    failing("write on 1", 2, arrays, "write_shards", 1, full)
    failing("write on 0", 2, arrays, "write_shards", 0, full)
    failing("flush on 1", 2, os, "fsync", 1, full)
    failing("bug on 1", 2, arrays, "write_shards", 1, RuntimeError("something of ours"))
    failing("make on 0", 2, Path, "mkdir", 0, denied)
    failing("manifest on 0", 2, commit, "_write_file", 0, full)
    failing("rename on 0", 2, Path, "rename", 0, denied)
    save(3)
    told["at last: steps"] = str(steps(folder))
    return told


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return processes.run(_with_failures, 2, tmp_path_factory.mktemp("failures"), timeout=120)


FAILURES = {
    "write on 1": "rank 1 could not write its part of the checkpoint: no space left: needs 56 B, ",
    "write on 0": "rank 0 could not write its part of the checkpoint: no space left: needs 56 B, ",
    "flush on 1": "rank 1 could not write its part of the checkpoint: no space left: needs 56 B, ",
    "bug on 1": "rank 1 could not write its part of the checkpoint: RuntimeError: something of ours",
    "make on 0": "rank 0 could not create a folder for the checkpoint: Permission denied",
    "manifest on 0": "rank 0 could not finish the checkpoint: no space left: needs 56 B, ",
    "rename on 0": "rank 0 could not finish the checkpoint: Permission denied",
}


def test_what_a_rank_has_written_is_told_to_rank_0_alone(tmp_path: Path) -> None:
    """Among a thousand ranks, a description of every array of each is more than a message to all may hold."""
    told = dict[str, int]()

    class Listening(Threads):
        def gather(self, value: Any, what: str) -> list[Any]:
            everyone = super().gather(value, what)
            told[what] = len(json.dumps(everyone))
            return everyone

        def gather_to_first(self, value: Any, what: str) -> list[Any]:
            everyone = Threads.gather(self, value, what)
            return everyone if self.rank == 0 else []

    group = Listening(3)

    def write() -> Path:
        mine = [ArrayShard(f"model/{name}", (3, 2), (group.rank, 0), torch.ones(1, 2)) for name in range(200)]
        return commit.save_checkpoint(tmp_path, Snapshot(2, mine, STATE), group, keep=2)

    (path,) = set(group.run(write))
    assert len(commit.open_checkpoint(path).arrays) == 200
    assert told and max(told.values()) < 300


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_on_one_rank_fails_all_by_name_and_leaves_the_older_checkpoint_alone(
    failures: list[dict[str, str]], failure: str
) -> None:
    for told in failures:
        assert FAILURES[failure] in told[failure]
        assert (told[f"{failure}: left"], told[f"{failure}: steps"]) == ("[]", "[1]")


def test_a_save_after_failures_succeeds_and_is_seen_by_all_ranks(failures: list[dict[str, str]]) -> None:
    for told in failures:
        assert told["at last: steps"] == "[1, 3]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e5m2])
def test_a_state_that_is_not_finite_is_not_saved_on_any_rank(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    commit.save_checkpoint(tmp_path, Snapshot(2, shards(2), STATE), SingleProcess(), keep=2)
    moment = torch.ones(4).to(dtype)
    moment[2] = value
    group = Threads(2)

    def attempt(finite: bool) -> str:
        own = [ArrayShard("optimizer/w/exp_avg", (4,), (0,), moment if group.rank else torch.ones(4), finite)]
        own[0] = ArrayShard(
            f"{own[0].name}_{group.rank}", *(getattr(own[0], n) for n in ("shape", "offset", "data", "finite"))
        )
        try:
            commit.save_checkpoint(tmp_path, Snapshot(4, own, STATE), group, keep=2)
        except NonFiniteError as error:
            assert error.exit_code == 3
            return str(error)
        return ""

    refused = group.run(lambda: attempt(True))
    assert len(set(refused)) == 1
    assert "the state after step 4 is not finite (rank 1: 'optimizer/w/exp_avg_1' (1 of " in refused[0]
    assert steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert group.run(lambda: attempt(False)) == ["", ""], "a mask may hold them"


# what is killed -----------------------------------------------------------------------------------------------------


def _pieces(step: int) -> list[ArrayShard]:
    return [ArrayShard(f"model/{name}", (2**15,), (0,), torch.full((2**15,), float(step))) for name in "abcd"]


def _save_for_ever(folder: Path, step: int) -> None:
    while True:
        step += 1
        commit.save_checkpoint(folder, Snapshot(step, _pieces(step), {"step": step}), SingleProcess(), keep=2)


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
        found = commit.find_checkpoints(tmp_path)
        assert found
        for path in found:
            step = commit.open_checkpoint(path).step
            assert all(torch.equal(array, _pieces(step)[0].data) for array in load(path).values())
        assert step > newest
        newest = step
    assert interrupted, "no kill fell into a save"
