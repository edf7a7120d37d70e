"""Saves beside training: of the moment, one at a time, and loud on every rank at the same step when they fail."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from packages.unisono.tests import processes
from packages.unisono.tests.checkpoint.saved import steps
from unisono.checkpoint.core import arrays, commit
from unisono.checkpoint.core import saver as saver_module
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.saver import Saver
from unisono.config.schema.run import Checkpoint as Settings
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import NonFiniteError, SaveError, UnisonoError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
AWAY = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def state(value: float, rank: int = 0, size: int = 1) -> list[ArrayShard]:
    return [ArrayShard("model/w", (2 * size,), (2 * rank,), torch.full((2,), value), finite=True)]


def of(path: Path) -> list[float]:
    reader = commit.open_checkpoint(path).reader()
    return list(reader.read("model/w", (0,), reader.shapes["model/w"]).tolist())


@contextmanager
def held() -> Iterator[threading.Event]:
    """No file is written until the event is set."""
    go, write = threading.Event(), arrays.write_shards

    def waiting(*arguments: Any) -> Any:
        assert go.wait(30)
        return write(*arguments)

    with mock.patch.object(arrays, "write_shards", waiting):
        try:
            yield go
        finally:
            go.set()


def failing(error: BaseException = FULL) -> Any:
    return mock.patch.object(arrays, "write_shards", side_effect=error)


def until_told(saver: Saver, seconds: float = 30.0) -> None:
    """Make steps until the save in flight is over."""
    deadline = time.monotonic() + seconds
    while saver._pending is not None:
        assert time.monotonic() < deadline
        saver.check()
        time.sleep(0.001)


# one process ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_of_the_call(tmp_path: Path) -> None:
    saver, shards = Saver(tmp_path, SingleProcess(), Settings()), state(1.0)
    with held() as go:
        saver.save(Snapshot(3, shards, {"step": 3}))
        shards[0].data.fill_(2.0)
        saver.check()
        assert commit.find_checkpoints(tmp_path) == []
        go.set()
        saver.finish()
    assert of(tmp_path / "step-00000003") == [1.0, 1.0]


def test_a_save_does_not_wait_for_the_disk_but_the_next_waits_for_it(tmp_path: Path) -> None:
    saver = Saver(tmp_path, SingleProcess(), Settings())
    with held() as go:
        saver.save(Snapshot(3, state(3.0), {}))
        threading.Timer(0.2, go.set).start()
        saver.save(Snapshot(4, state(4.0), {}))
        assert steps(tmp_path) == [3]
    saver.finish()
    assert (of(tmp_path / "step-00000003"), of(tmp_path / "step-00000004")) == ([3.0, 3.0], [4.0, 4.0])


@pytest.mark.parametrize("background", [True, False])
def test_every_checkpoint_is_told_once_and_knows_the_one_before(tmp_path: Path, background: bool) -> None:
    told: list[Path] = []
    settings = Settings(background=background, keep=5)
    with Saver(tmp_path, SingleProcess(), settings, first=2, finished=told.append) as saver:
        saver.save(Snapshot(2, state(2.0), {}))  # the run goes on from there
        for step in (4, 6, 6):
            saver.save(Snapshot(step, state(float(step)), {"step": step}, {"code": "a"}, {"loss": 0.5}))
    assert told == [tmp_path / "step-00000004", tmp_path / "step-00000006"] == commit.find_checkpoints(tmp_path)
    first, second = (commit.open_checkpoint(path) for path in told)
    assert (first.parent, second.parent) == ("step-00000002", "step-00000004")
    assert (first.about, first.metric, first.state) == ({"code": "a"}, {"loss": 0.5}, {"step": 4})


def test_a_failure_ends_the_run_with_the_next_step(tmp_path: Path) -> None:
    saver = Saver(tmp_path, SingleProcess(), Settings())
    saver.save(Snapshot(1, state(1.0), {}))
    until_told(saver)
    with failing():
        saver.save(Snapshot(2, state(2.0), {}))
        with pytest.raises(
            SaveError, match=r"of step 2 was not written \(the newest is from step 1\).*no space left"
        ) as caught:
            until_told(saver)
    assert caught.value.exit_code == 7
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("when", ["next save", "finish", "context"])
def test_a_failure_is_told_by_whatever_comes_next(tmp_path: Path, when: str) -> None:
    with (
        failing(),
        pytest.raises(SaveError, match="there is none yet"),
        Saver(tmp_path, SingleProcess(), Settings()) as saver,
    ):
        saver.save(Snapshot(2, state(2.0), {}))
        if when == "next save":
            saver.save(Snapshot(3, state(3.0), {}))
        elif when == "finish":
            saver.finish()


def test_without_a_background_a_failure_is_told_at_once(tmp_path: Path) -> None:
    saver = Saver(tmp_path, SingleProcess(), Settings(background=False))
    with failing(), pytest.raises(SaveError, match="no space left"):
        saver.save(Snapshot(2, state(2.0), {}))
    saver.save(Snapshot(2, state(2.0), {}))
    assert steps(tmp_path) == [2]


@contextmanager
def away(times: int, error: OSError = AWAY, *, what: str = "write") -> Iterator[list[int]]:
    """So many writes fail, or flushes of the folder of checkpoints; the pauses between two tries are short."""
    real = {"write": arrays.write_shards, "sync": commit.fsync_path}[what]
    made: list[int] = []

    def failing(*arguments: Any) -> Any:
        if what == "sync" and arguments[0].name.startswith((".writing", "manifest")):
            return real(*arguments)
        made.append(len(made))
        if len(made) <= times:
            raise error
        return real(*arguments)

    owner, name = {"write": (arrays, "write_shards"), "sync": (commit, "fsync_path")}[what]
    with mock.patch.object(owner, name, failing), mock.patch.object(saver_module, "_FIRST_PAUSE", 0.01):
        yield made


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("what", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_what_may_pass_is_tried_again_from_the_copies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool, what: str, code: int
) -> None:
    shards = state(1.0)
    with away(3, OSError(code, os.strerror(code)), what=what) as made:
        saver = Saver(tmp_path, SingleProcess(), Settings(background=background))
        saver.save(Snapshot(3, shards, {"step": 3}))
        if background:
            shards[0].data.fill_(2.0)
        saver.finish()
    assert len(made) == 4
    assert of(tmp_path / "step-00000003") == [1.0, 1.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert sum("Retrying in" in record.message for record in caplog.records) == 3


def test_what_does_not_pass_ends_after_the_time_that_is_set_for_it(tmp_path: Path) -> None:
    with away(10**6) as made:
        saver = Saver(tmp_path, SingleProcess(), Settings(retry_for=0.1))
        saver.save(Snapshot(3, state(1.0), {}))
        with pytest.raises(SaveError, match=r"\d+ attempts in 0 s \(checkpoint.retry_for\)"):
            saver.finish()
    assert len(made) >= 2, "it was tried again"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("settings", "error"), [({"retry_for": 0.0}, AWAY), ({}, FULL)])
def test_what_is_not_to_be_tried_again_is_not(tmp_path: Path, settings: dict[str, Any], error: OSError) -> None:
    with away(1, error) as made:
        saver = Saver(tmp_path, SingleProcess(), Settings(**settings))
        saver.save(Snapshot(3, state(1.0), {}))
        with pytest.raises(SaveError) as caught:
            saver.finish()
    assert "retry_for" not in str(caught.value)
    assert len(made) == 1


def test_a_run_that_has_to_go_tries_nothing_again(tmp_path: Path) -> None:
    with away(10**6) as made, mock.patch.object(saver_module, "_FIRST_PAUSE", 3600.0):
        saver = Saver(tmp_path, SingleProcess(), Settings(retry_for=1e6))
        saver.save(Snapshot(3, state(1.0), {}))
        deadline = time.monotonic() + 30
        while not made and time.monotonic() < deadline:
            time.sleep(0.01)
        saver.stop_retrying()
        with pytest.raises(SaveError, match="Stale file handle"):
            saver.finish()
    assert len(made) <= 2  # the second if it was in the pause before that, which it does not sit out


@pytest.mark.parametrize("background", [True, False])
def test_a_run_that_may_go_on_is_told_until_a_later_save_succeeds(tmp_path: Path, background: bool) -> None:
    said: list[str] = []
    settings = Settings(on_failure="continue", background=background)
    saver = Saver(tmp_path, SingleProcess(), settings, say=said.append)
    saver.save(Snapshot(1, state(1.0), {}))
    until_told(saver)
    assert saver.unsaved_since is None
    with failing():
        for step in (2, 3):
            saver.save(Snapshot(step, state(float(step)), {}))
            until_told(saver)
            assert saver.unsaved_since == 1
    assert ["of step 2" in said[0], "of step 3" in said[1], len(said)] == [True, True, 2]
    saver.save(Snapshot(4, state(4.0), {}))
    until_told(saver)
    assert saver.unsaved_since is None
    saver.finish()
    assert steps(tmp_path) == [1, 4]
    assert commit.read_manifest(tmp_path / "step-00000004").parent == "step-00000001"


def test_a_run_that_may_go_on_does_not_end_with_success_unsaved(tmp_path: Path) -> None:
    saver = Saver(tmp_path, SingleProcess(), Settings(on_failure="continue"))
    with failing():
        saver.save(Snapshot(2, state(2.0), {}))
        with pytest.raises(SaveError, match="no space left"):
            saver.finish()


@pytest.mark.parametrize("background", [True, False])
def test_a_state_that_is_not_finite_ends_the_run_whatever_the_policy(tmp_path: Path, background: bool) -> None:
    saver = Saver(tmp_path, SingleProcess(), Settings(on_failure="continue", background=background))
    with pytest.raises(NonFiniteError, match="'model/w'"):
        saver.save(Snapshot(2, state(float("nan")), {}))
        until_told(saver)
    assert not tmp_path.exists() or steps(tmp_path) == []


def test_what_is_a_fault_of_ours_is_loud_too(tmp_path: Path) -> None:
    saver = Saver(tmp_path, SingleProcess(), Settings())
    with failing(RuntimeError("a bug")), pytest.raises(SaveError, match="RuntimeError: a bug"):
        saver.save(Snapshot(2, state(2.0), {}))
        saver.finish()


def test_a_run_that_fails_lets_the_save_in_flight_end(tmp_path: Path) -> None:
    with held() as go, pytest.raises(KeyError), Saver(tmp_path, SingleProcess(), Settings()) as saver:
        saver.save(Snapshot(2, state(2.0), {}))
        threading.Timer(0.2, go.set).start()
        raise KeyError
    assert steps(tmp_path) == [2]


# two processes --------------------------------------------------------------------------------------------------------


def _stories(place: ProcessInfo, group: Communicator, folder: Path) -> dict[str, Any]:
    """What happens to this rank's saves when one of two is slow, or fails."""
    told: dict[str, Any] = {}

    def attempt(name: str, settings: Settings, patch: Any, rank: int, value: float = 1.0) -> Saver:
        """A good save, one that fails on a rank, and steps until it is told."""
        saver = Saver(folder / name, group, settings, say=lambda line: told.update({f"{name}: said": line}))
        saver.save(Snapshot(1, state(1.0, place.rank, 2), {}))
        until_told(saver)
        try:
            with patch if place.rank == rank else mock.patch.object(arrays, "MAX_PIECE_BYTES", arrays.MAX_PIECE_BYTES):
                saver.save(Snapshot(2, state(value if place.rank == rank else 1.0, place.rank, 2), {}))
                for step in range(3, 10_000):
                    told[f"{name}: step"] = step
                    if saver._pending is None:
                        break
                    saver.check()
                    time.sleep(0.002 * (1 + place.rank))
        except UnisonoError as error:
            told[name] = [type(error).__name__, error.exit_code, str(error)]
        told[f"{name}: steps"] = steps(folder / name)
        group.barrier("the next story")
        return saver

    # A rank that is slow: nobody waits for it, steps go on, and nothing is there before it is done.
    saver = Saver(folder / "slow", group, Settings())
    with held() as go:
        if not place.is_first:
            threading.Timer(0.3, go.set).start()
        else:
            go.set()
        began = time.monotonic()
        saver.save(Snapshot(1, state(float(place.rank), place.rank, 2), {"step": 1}))
        told["slow: blocked"] = time.monotonic() - began
        made = 0
        while saver._pending is not None:
            saver.check()
            made += 1
            time.sleep(0.01)
    told["slow: steps made"], told["slow: content"] = made, of(folder / "slow" / "step-00000001")
    group.barrier("the next story")

    attempt("one fails", Settings(), failing(), 1)
    attempt("first fails", Settings(), failing(), 0)
    attempt("not finite", Settings(on_failure="continue"), failing(), 1, float("inf"))
    attempt("at once", Settings(background=False), failing(), 1)
    saver = attempt("goes on", Settings(on_failure="continue"), failing(), 1)
    told["goes on: unsaved"] = saver.unsaved_since
    saver.save(Snapshot(9, state(9.0, place.rank, 2), {}))
    saver.finish()
    told["goes on: saved"] = [saver.unsaved_since, steps(folder / "goes on")]

    # What passes on one rank is waited for by both; what one of them could not get over is not tried again by any.
    with away(2 if place.rank == 1 else 0) as made:
        saver = Saver(folder / "away", group, Settings())
        saver.save(Snapshot(1, state(1.0, place.rank, 2), {}))
        saver.finish()
    told["away: tries"] = len(made)
    with away(1, AWAY if place.is_first else FULL) as made, Saver(folder / "away", group, Settings(), first=1) as saver:
        saver.save(Snapshot(2, state(1.0, place.rank, 2), {}))
        with pytest.raises(SaveError, match=r"rank 0 could not .*; rank 1 could not .*no space left"):
            saver.finish()
        saver._failed = None
    told["away: tries, full"] = len(made)
    told["away: steps"] = steps(folder / "away")
    return told


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes.run(_stories, 2, tmp_path_factory.mktemp("stories"), timeout=120)


def test_nobody_waits_for_a_rank_that_writes_slowly(stories: list[dict[str, Any]]) -> None:
    for told in stories:
        assert told["slow: blocked"] < 0.25
        assert told["slow: steps made"] > 3
        assert told["slow: content"] == [0.0, 0.0, 1.0, 1.0]
    assert stories[0]["slow: steps made"] == stories[1]["slow: steps made"]


@pytest.mark.parametrize(("name", "rank"), [("one fails", 1), ("first fails", 0), ("at once", 1)])
def test_a_failure_on_one_rank_is_told_on_all_after_the_same_step(
    stories: list[dict[str, Any]], name: str, rank: int
) -> None:
    first, second = stories
    assert first[name] == second[name]
    kind, code, text = first[name]
    assert (kind, code) == ("SaveError", 7)
    assert f"rank {rank} could not write its part of the checkpoint: no space left" in text
    assert first.get(f"{name}: step") == second.get(f"{name}: step")
    assert first[f"{name}: steps"] == second[f"{name}: steps"] == [1]


def test_what_passes_on_one_rank_is_tried_again_by_all(stories: list[dict[str, Any]]) -> None:
    assert [told["away: tries"] for told in stories] == [3, 3]
    assert [told["away: tries, full"] for told in stories] == [1, 1]
    assert [told["away: steps"] for told in stories] == [[1], [1]]


def test_numbers_that_are_not_finite_on_one_rank_end_all(stories: list[dict[str, Any]]) -> None:
    first, second = stories
    assert first["not finite"] == second["not finite"]
    assert first["not finite"][:2] == ["NonFiniteError", 3]
    assert "rank 1: 'model/w'" in first["not finite"][2]
    assert first["not finite: step"] == second["not finite: step"]
    assert first["not finite: steps"] == [1]


def test_all_ranks_go_on_together_where_they_may(stories: list[dict[str, Any]]) -> None:
    for told in stories:
        assert "goes on" not in told
        assert told["goes on: step"] == stories[0]["goes on: step"]
        assert told["goes on: unsaved"] == 1
        assert "the next save that is due will try again" in told["goes on: said"]
        assert told["goes on: saved"] == [None, [1, 9]]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_disk_that_does_not_answer_is_told_and_holds_nothing_up(tmp_path: Path, policy: Any) -> None:
    said: list[str] = []
    saver = Saver(tmp_path, SingleProcess(), Settings(on_failure=policy), say=said.append, deadline=0.2)
    saver.save(Snapshot(2, state(2.0), {}))
    saver.finish()
    with held() as go:
        saver.save(Snapshot(4, state(4.0), {}))
        saver.check()
        assert saver.unsaved_since is None
        time.sleep(0.25)
        told = r"step 4 was not written \(the newest is from step 2\): rank 0 has not written its part for 0.2 s "
        if policy == "stop":
            with pytest.raises(SaveError, match=told):
                saver.check()
            return
        for made in (5, 6):
            saver.check()
            assert saver.unsaved_since == 2
            saver.save(Snapshot(made, state(6.0), {}))  # which does not wait for the one in flight
        assert len(said) == 1 and "does not respond" in said[0]
        go.set()
        until_told(saver)
    assert saver.unsaved_since is None and steps(tmp_path) == [2, 4]
    saver.save(Snapshot(8, state(8.0), {}))
    saver.finish()
    assert of(tmp_path / "step-00000008") == [8.0, 8.0]
