"""What the loop does with checkpoints: beside the steps, of the moment, and loud when one cannot be written."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from packages.unisono.tests import runs
from packages.unisono.tests.checkpoint.saved import load
from packages.unisono.tests.runs import checkpoints, configuration
from packages.unisono.tests.tasks import TransformerTask, Words
from unisono.checkpoint.core import arrays, commit, staging
from unisono.checkpoint.core.saver import Saver
from unisono.config.schema.run import RunConfig
from unisono.engines.state import ArrayShard
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.state.train_state import TrainState
from unisono.observe import events
from unisono.runtime.errors import ConfigError, DataError, NonFiniteError, SaveError
from unisono.task import Task


def config(steps: int = 6, **groups: Any) -> RunConfig:
    train = {"steps": steps, "global_batch": 8}
    return configuration(**{"observe": {"log_every": 1}, **groups, "train": train})


def run(folder: Path, how: RunConfig, task: Task | None = None) -> runs.Result:
    return runs.train(folder, how, task or TransformerTask())


@pytest.fixture
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in flight is over before the next step looks: what follows does not depend on the clock."""
    check = Saver.check

    def patient(saver: Saver) -> None:
        if saver._pending is not None and saver._pending.thread is not None:
            saver._pending.thread.join()
        check(saver)

    monkeypatch.setattr(Saver, "check", patient)


def full_in(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk is full whenever one of these steps is saved."""
    write = arrays.write_shards

    def limited(file: Path, shards: Any, note: dict[str, str]) -> Any:
        if int(note["step"]) in steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write(file, shards, note)

    monkeypatch.setattr(arrays, "write_shards", limited)


def test_what_is_saved_beside_the_steps_is_what_would_be_saved_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each file is written only when the next step has changed everything."""
    beside, between = tmp_path / "beside", tmp_path / "between"
    run(between, config(4, checkpoint={"every": 1, "keep": 9, "background": False}))
    write, step = arrays.write_shards, TorchEngine.step
    made = threading.Condition()
    count = [0]

    def stepping(engine: Any, batches: Any, number: int, scalars: Any) -> Any:
        result = step(engine, batches, number, scalars)
        with made:
            count[0] = number + 1
            made.notify_all()
        return result

    def late(file: Path, shards: Any, note: dict[str, str]) -> Any:
        with made:
            assert made.wait_for(lambda: count[0] > int(note["step"]) or count[0] == 4, 30)
        return write(file, shards, note)

    monkeypatch.setattr(arrays, "write_shards", late)
    monkeypatch.setattr(TorchEngine, "step", stepping)
    run(beside, config(4, checkpoint={"every": 1, "keep": 9}))
    assert checkpoints(beside) == checkpoints(between) == [1, 2, 3, 4]
    before: dict[str, torch.Tensor] = {}
    for mine, theirs in zip(
        commit.find_checkpoints(beside / "checkpoints"), commit.find_checkpoints(between / "checkpoints"), strict=True
    ):
        one, other = load(mine), load(theirs)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert not before or any(not torch.equal(one[name], before[name]) for name in one), "steps change nothing"
        before = one


@pytest.mark.parametrize(("every", "background"), [(2, True), (2, False), (None, True)])
def test_the_first_save_finds_the_memory_of_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None, background: bool
) -> None:
    """It is asked for after the first step, if saves beside the steps are to come, and is enough."""
    asked: list[int] = []

    def memory(size: int) -> Any:
        asked.append(size)
        return _memory(size)

    _memory = staging._allocate
    monkeypatch.setattr(staging, "_allocate", memory)
    copied: list[list[int]] = []
    copy = staging.Staging.copy

    def watched(self: staging.Staging, shards: Sequence[ArrayShard]) -> list[ArrayShard]:
        self.wait_until_prepared()
        copied.append(list(asked))
        return copy(self, shards)

    monkeypatch.setattr(staging.Staging, "copy", watched)
    run(tmp_path, config(checkpoint={"every": every, "background": background}))
    assert checkpoints(tmp_path)[-1] == 6
    before = copied[0] if copied else asked
    assert len(copied) == (0 if not background else 3 if every else 1)
    assert bool(before) == (background and every is not None)
    if before:
        assert asked == before and max(asked) > 1000


def test_a_save_that_fails_ends_the_run_after_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_at_once: None
) -> None:
    full_in(monkeypatch, 4)
    with pytest.raises(
        SaveError, match=r"checkpoint of step 4 .*newest is from step 2.*no space left: needs .* free at"
    ) as e:
        run(tmp_path, config(6, checkpoint={"every": 2}))
    assert e.value.exit_code == 7
    assert checkpoints(tmp_path) == [2]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert max(event["step"] for event in events.read_events(tmp_path / "events.jsonl")) == 4


def test_the_last_save_is_waited_for_and_its_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_in(monkeypatch, 6)
    for policy in ("stop", "continue"):
        with pytest.raises(SaveError, match="checkpoint of step 6"):
            run(tmp_path / policy, config(6, checkpoint={"every": 4, "on_failure": policy}))
        assert checkpoints(tmp_path / policy) == [4]


def test_a_run_that_goes_on_without_a_checkpoint_says_so_in_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    full_in(monkeypatch, 4, 6)
    assert run(tmp_path, config(10, checkpoint={"every": 2, "on_failure": "continue", "keep": 9})).step == 10
    assert checkpoints(tmp_path) == [2, 8, 10]
    assert commit.read_manifest(commit.find_checkpoints(tmp_path / "checkpoints")[1]).parent == "step-00000002"
    lines = capsys.readouterr().out.splitlines()
    unsaved = [line.split("/")[0] for line in lines if line.endswith("unsaved since step 2")]
    assert unsaved == ["step  5", "step  6", "step  7", "step  8"]
    assert sum("was not written" in line for line in lines) == 2
    told = {
        e["step"]: e.get("unsaved_since") for e in events.read_events(tmp_path / "events.jsonl") if not e.get("eval")
    }
    assert told == {step: 2 if 5 <= step <= 8 else None for step in range(1, 11)}


def test_a_state_that_is_not_finite_is_never_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_at_once: None
) -> None:
    update = TrainState.update

    def spoiling(state: Any, step: int, scalars: Any) -> None:
        update(state, step, scalars)
        if step == 3:
            with torch.no_grad():
                next(iter(state.optimizer.state.values()))["momentum_buffer"].view(-1)[1] = float("inf")

    monkeypatch.setattr(TrainState, "update", spoiling)
    with pytest.raises(NonFiniteError, match=r"after step 4 .*'optimizer/embedding.weight/momentum_buffer' \(1 of"):
        run(tmp_path, config(6, checkpoint={"every": 2}))
    assert checkpoints(tmp_path) == [2]


def test_the_best_checkpoint_by_a_metric_remains(tmp_path: Path) -> None:
    best = {"every": 1, "keep": 1, "keep_best": {"metric": "accuracy", "mode": "max"}}
    run(tmp_path, config(6, checkpoint=best, eval={"every": 1}))
    found = {e["step"]: e["accuracy"] for e in events.read_events(tmp_path / "events.jsonl") if e.get("eval")}
    largest = max(found, key=lambda step: (found[step], step))
    assert checkpoints(tmp_path) == sorted({largest, 6})
    for path in commit.find_checkpoints(tmp_path / "checkpoints"):
        checkpoint = commit.read_manifest(path)
        assert checkpoint.metric is not None
        assert checkpoint.metric["accuracy"] == found[checkpoint.step]


class NothingHeldOut(TransformerTask):
    def held_out(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (
            TransformerTask,
            r"checkpoint.keep_best.metric=accuarcy: this task's .* no such metric.* did you mean 'accuracy'\?",
        ),
        (
            NothingHeldOut,
            r"checkpoint.keep_best.metric=accuarcy: this task's .* no such metric.* and there is none to choose from",
        ),
    ],
)
def test_a_metric_that_does_not_exist_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Callable[[], Task], told: str
) -> None:
    monkeypatch.setattr(TorchEngine, "step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(ConfigError, match=told):
        run(tmp_path, config(6, checkpoint={"keep_best": {"metric": "accuarcy"}}, eval={"every": 1}), task())


def test_looking_for_the_names_of_metrics_changes_no_bit(tmp_path: Path) -> None:
    with_names = {"checkpoint": {"every": 6, "keep_best": {"metric": "accuracy"}}, "eval": {"every": 3}}
    plain = {"checkpoint": {"every": 6}, "eval": {"every": 3}}
    task = TransformerTask.Config(dropout=0.1)
    run(tmp_path / "a", config(6, **with_names), TransformerTask(task))
    run(tmp_path / "b", config(6, **plain), TransformerTask(task))
    one, other = (load(commit.find_checkpoints(tmp_path / name / "checkpoints")[-1]) for name in "ab")
    assert all(torch.equal(one[name], other[name]) for name in other)


class Watched(Words):
    """Rows whose files change before the second time that they are looked at."""

    looked = 0

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        self.looked += 1
        assert (share, shares) == (0, 1)
        if self.looked == 2:
            raise DataError("a.jsonl has changed")


@pytest.mark.parametrize("which", ["data", "held_out"])
def test_nothing_is_saved_of_data_that_change(tmp_path: Path, which: str, told_at_once: None) -> None:
    class Changing(TransformerTask):
        pass

    rows = Watched(27)
    setattr(Changing, which, lambda _: rows)
    with pytest.raises(DataError, match=r"^a\.jsonl has changed\. Training .* was not saved$"):
        run(tmp_path, config(checkpoint={"every": 2}), Changing())
    assert checkpoints(tmp_path) == [2]
    assert events.step_events(events.read_events(tmp_path / "events.jsonl"))[-1]["step"] == 4
