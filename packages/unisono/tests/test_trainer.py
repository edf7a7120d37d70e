"""The loop: what a run leaves behind, where it goes on, and that it leaves nothing running."""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import runs
from packages.unisono.tests.runs import checkpoints, configuration, evaluations, interrupted, steps
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.checkpoint.core import commit, resume_point
from unisono.config.schema.run import RunConfig
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.engines.torch.engine import TorchEngine
from unisono.observe import events
from unisono.observe.run_record import RunRecord
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import CheckpointError, ConfigError, DataError, GuardError, RunError
from unisono.task import Context, Loss, SampleContext, Task
from unisono.training.loop import Result


def config(steps: int = 5, **groups: Any) -> RunConfig:
    train = {"steps": steps, "global_batch": 8, **groups.pop("train", {})}
    return configuration(**{"observe": {"progress": False}, **groups, "train": train})


def run(folder: Path, how: RunConfig, task: Task | None = None) -> Result:
    return runs.train(folder, how, task or TransformerTask())


def evaluate(folder: Path, how: RunConfig, task: Task | None = None) -> dict[str, float]:
    return runs.evaluate(folder, how, task or TransformerTask())


# a whole run ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run of five steps that was evaluated and saved after every second one, and at the end."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, config(eval={"every": 2}, checkpoint={"every": 2, "keep": 10}))


def test_a_run_writes_an_event_for_every_step(whole: tuple[Path, Result]) -> None:
    assert steps(whole[0]) == [1, 2, 3, 4, 5]
    for event in events.read_events(whole[0] / "events.jsonl"):
        names = {"loss", "loss/next", "loss/length", "accuracy"}
        assert names < event.keys()
        assert event.get("eval") or {"lr", "grad_norm", "tokens_per_second", "data_wait"} < event.keys()


def test_a_run_is_evaluated_saved_and_logged_every_so_many_steps_and_once_at_the_end(
    whole: tuple[Path, Result], tmp_path: Path
) -> None:
    assert evaluations(whole[0]) == checkpoints(whole[0]) == [2, 4, 5]
    text = (whole[0] / "logs" / "rank-00000.log").read_text()
    assert re.findall(r"step (\d+) loss", text) == ["1", "2", "3", "4", "5"]
    run(tmp_path, config(2, eval={"every": 2}, checkpoint={"every": 2}))
    assert (evaluations(tmp_path), checkpoints(tmp_path)) == ([2], [2])


def test_a_result_tells_folder_steps_last_loss_and_last_evaluation(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    found = events.read_events(folder / "events.jsonl")
    assert (result.folder, result.step) == (folder, 5)
    assert result.loss == next(event["loss"] for event in found if event["step"] == 5)
    assert found[-1]["eval"]
    assert result.evaluation.keys() == {"loss", "loss/next", "loss/length", "accuracy"}
    assert all(found[-1][name] == value for name, value in result.evaluation.items())


def test_a_checkpoint_keeps_what_a_resume_has_to_know(whole: tuple[Path, Result], tmp_path: Path) -> None:
    (newest,) = commit.find_checkpoints(whole[0] / "checkpoints")[-1:]
    checkpoint = commit.read_manifest(newest)
    kept = checkpoint.state
    assert kept.keys() == resume_point.KEYS | resume_point.OPTIONAL_KEYS
    assert [kept[name] for name in ("step", "total", "random", "micro_batch", "plan")] == [5, 5, False, 8, None]
    assert checkpoint.about["config"]["train"]["steps"] == 5
    run(tmp_path, config(1), TransformerTask(TransformerTask.Config(dropout=0.1)))
    (newest,) = commit.find_checkpoints(tmp_path / "checkpoints")
    assert commit.read_manifest(newest).state["random"] is True, "the forward pass draws random numbers"


def test_evaluating_a_run_gives_what_its_own_last_evaluation_gave_and_writes_and_says_nothing(
    whole: tuple[Path, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}
    found = evaluate(whole[0], config(observe={"progress": True, "trackers": ["tensorboard"]}))
    assert found == {"step": 5, **whole[1].evaluation}
    assert {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()} == before
    assert capsys.readouterr().out == ""


def test_training_learns_and_a_task_without_held_out_rows_is_not_evaluated(tmp_path: Path) -> None:
    result = run(tmp_path, config(40, optim={"kind": "sgd", "lr": 0.1}, eval={"every": 1}), LinearTask())
    assert result.loss is not None
    assert result.loss < 0.1 * events.read_events(tmp_path / "events.jsonl")[0]["loss"]
    assert dict(result.evaluation) == {}
    assert evaluations(tmp_path) == []


@pytest.mark.parametrize("every", [None, 2])
def test_the_end_is_neither_evaluated_nor_saved_if_it_is_not_to_be(tmp_path: Path, every: int | None) -> None:
    run(tmp_path, config(3, eval={"every": every, "at_end": False}, checkpoint={"every": every, "at_end": False}))
    assert evaluations(tmp_path) == checkpoints(tmp_path) == ([2] if every else [])


def test_a_run_counted_in_epochs_ends_with_a_short_batch(tmp_path: Path) -> None:
    how = configuration(train={"epochs": 1, "global_batch": 12}, observe={"progress": False})
    assert run(tmp_path, how, CountsRows()).step == 4  # 40 rows
    assert [event["rows_seen"] for event in events.read_events(tmp_path / "events.jsonl")] == [12, 12, 12, 4]


class CountsRows(LinearTask):
    """A metric that is the number of rows in the whole batch."""

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        return Loss(dict(super().loss(outputs, batch, context).sums), metrics={"rows_seen": (len(batch["x"]), 1)})


# the console ----------------------------------------------------------------------------------------------------------


class Known(LinearTask):
    """A task that has something to say about its data."""

    def facts(self) -> dict[str, Any]:
        return {"mixture": "1:100:1 [b]"}


def test_a_run_says_what_is_trained_on_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = config(3, observe={"progress": True}, layout={"micro_batch": 4})
    run(tmp_path, how, Known())
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "test: 4 parameters, 1 × cpu, single, fp32, 3 steps, global batch 8 = 1 × 2 × 4 rows"
    assert told[1] == "  sgd, lr 0.1, weight decay 0.01: 3 parameters in weight; 1 more group in the log"
    assert [line.split("/")[0] for line in told[2:4]] == ["step 1", "step 3"]
    assert told[4:] == [f"run: {tmp_path}"]
    log = (tmp_path / "logs" / "rank-00000.log").read_text()
    others = (
        "sgd, lr 0.1, weight decay 0: 1 parameters in bias",
        "rows: 40",
        "mixture: 1:100:1 [b]",
        "loading: 1 thread",
    )
    assert all(f": {line}" in log for line in others)


# runs that go on ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_without_repeating_a_step_and_says_after_which(
    tmp_path: Path, whole: tuple[Path, Result], capsys: pytest.CaptureFixture[str]
) -> None:
    how = config(eval={"every": 2}, checkpoint={"every": 2, "keep": 10}, observe={"progress": True})
    with interrupted(before=3):
        run(tmp_path, how)
    assert (steps(tmp_path), checkpoints(tmp_path)) == ([1, 2, 3], [2])
    assert "resuming" not in capsys.readouterr().out
    result = run(tmp_path, how)
    assert "resuming after step 2\n" in capsys.readouterr().out
    assert (steps(tmp_path), evaluations(tmp_path), checkpoints(tmp_path)) == ([1, 2, 3, 4, 5], [2, 4, 5], [2, 4, 5])
    assert (result.step, result.loss, result.evaluation) == (5, whole[1].loss, whole[1].evaluation)


def test_a_run_that_was_interrupted_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    with interrupted(before=2):
        run(tmp_path, config(3))
    assert (steps(tmp_path), checkpoints(tmp_path)) == ([1, 2], [])
    assert run(tmp_path, config(3)).step == 3
    assert steps(tmp_path) == [1, 2, 3]


def test_a_run_that_is_complete_makes_no_step_and_gives_its_evaluation_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = config(2, observe={"progress": True})
    first = run(tmp_path, how)
    before = (tmp_path / "events.jsonl").read_bytes()
    capsys.readouterr()
    monkeypatch.setattr(TorchEngine, "step", lambda *_: pytest.fail("a step was made"))
    again = run(tmp_path, how)
    assert again == Result(tmp_path, 2, None, first.evaluation)
    assert (tmp_path / "events.jsonl").read_bytes() == before
    assert "nothing to do: all 2 steps are already done\n" in capsys.readouterr().out


@pytest.mark.parametrize("stop_after", [2, 3])
def test_a_start_that_ends_early_saves_and_a_later_one_goes_on(
    tmp_path: Path, whole: tuple[Path, Result], capsys: pytest.CaptureFixture[str], stop_after: int
) -> None:
    groups = {"eval": {"every": 2}, "checkpoint": {"every": 2, "keep": 10}, "observe": {"progress": True}}
    name = {"name": "test", "stop_after": stop_after}
    for _ in range(2):  # the second time there is nothing to do
        first = run(tmp_path, config(run=name, **groups))
        assert (steps(tmp_path), checkpoints(tmp_path)[-1]) == ([*range(1, stop_after + 1)], stop_after)
        assert f"stopped after step {stop_after} of 5 (run.stop_after)" in capsys.readouterr().out
    assert first.step == stop_after
    result = run(tmp_path, config(**groups))
    assert (steps(tmp_path), result.loss, result.evaluation) == ([1, 2, 3, 4, 5], whole[1].loss, whole[1].evaluation)
    assert evaluations(tmp_path) == [2, 4, 5]


def test_an_early_end_after_the_last_step_is_no_early_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = config(2, run={"name": "test", "stop_after": 7}, observe={"progress": True}, checkpoint={"at_end": False})
    assert run(tmp_path, how).step == 2
    assert checkpoints(tmp_path) == []
    assert "stop_after" not in capsys.readouterr().out


def test_a_run_that_was_longer_before_is_told_with_the_updates_it_has(tmp_path: Path) -> None:
    longer = run(tmp_path, config(3))
    shorter = config(2, run={"name": "test", "allow_change": ["train.steps"]})
    assert run(tmp_path, shorter) == Result(tmp_path, 3, None, longer.evaluation)
    assert steps(tmp_path) == [1, 2, 3]


class Elsewhere(SingleProcess):
    """A second rank that sees another folder."""

    size = 2

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, [*value[:2], []] if what == "the checkpoints that all ranks see" else value]


def test_ranks_that_see_different_checkpoints_are_refused(tmp_path: Path) -> None:
    run(tmp_path, config(2))
    with pytest.raises(
        CheckpointError, match=r"different checkpoints, \['step-00000002', None\]; is this a shared directory"
    ):
        runs.train(tmp_path, config(2), TransformerTask(), None, Elsewhere())


# evaluation of a run --------------------------------------------------------------------------------------------------


def test_a_run_without_held_out_rows_or_a_checkpoint_cannot_be_evaluated(nothing_left: None, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"^{re.escape(str(tmp_path))} has no checkpoint$"):
        evaluate(tmp_path, config(1, train={"precision": "fp64"}))
    run(tmp_path, config(1), LinearTask())
    with pytest.raises(RunError, match=f"^{re.escape(str(tmp_path))}: the task has no held-out rows$"):
        evaluate(tmp_path, config(1), LinearTask())


# what is left running -------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Nothing a run opens is open after it: threads, log files, the precision that it computes in."""
    gc.collect()
    before, handlers = set(threading.enumerate()), list(logging.getLogger("unisono").handlers)
    yield
    assert set(threading.enumerate()) <= before  # a thread of an earlier test may have ended since
    assert logging.getLogger("unisono").handlers == handlers
    assert torch.get_default_dtype() == torch.float32


class Unreadable(TransformerTask):
    """The row that stands at position 25 cannot be read."""

    def sample(self, record: Any, context: SampleContext) -> Any:
        if np.array_equal(record, self.data()[int(Order(27, 0)(np.array([25]))[0])]):
            raise OSError("the disk is gone")
        return super().sample(record, context)


class Untrainable(TransformerTask):
    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return super().outputs(model, batch, context).detach()


class Unspeakable(TransformerTask):
    """A fact that cannot be printed."""

    def facts(self) -> dict[str, Any]:
        return {"fact": type("Fact", (), {"__str__": lambda self: 1 / 0})()}


class Unevaluable(TransformerTask):
    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        if not context.training and context.step:
            raise ZeroDivisionError
        return super().loss(outputs, batch, context)


@pytest.mark.parametrize(
    ("task", "error", "made"),
    [
        (Unreadable, DataError, [1, 2, 3]),
        (Untrainable, ConfigError, []),
        (Unspeakable, ZeroDivisionError, []),
        (Unevaluable, ZeroDivisionError, [1, 2, 3, 4, 5]),
        (TransformerTask, None, [1, 2, 3, 4, 5]),
    ],
)
def test_a_run_leaves_its_steps_in_its_events_and_nothing_running_even_if_it_fails(
    nothing_left: None, tmp_path: Path, task: type[Task], error: type[Exception] | None, made: list[int]
) -> None:
    with pytest.raises(error) if error else nullcontext():
        run(tmp_path, config(5, train={"precision": "fp64"}, observe={"progress": True}), task())
    assert (steps(tmp_path) if (tmp_path / "events.jsonl").exists() else []) == made


def test_a_record_that_cannot_be_closed_keeps_nothing_else_open(
    nothing_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(RunRecord, "__exit__", full)
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path, config(2, train={"precision": "fp64"}))


# the order ------------------------------------------------------------------------------------------------------------


class Several(CountsRows):
    """Three sources, of blocks."""

    class Blocks(list[Any]):
        @property
        def blocks(self) -> np.ndarray:
            return np.array([2] * (len(self) // 2))

    def data(self) -> Any:
        rows = super().data()
        return {"a": self.Blocks(rows[:16]), "b": self.Blocks(rows[16:32]), "c": self.Blocks(rows[32:])}


MIXED = {
    "mixture": {"weights": {"a": 1, "b": 2, "c": 3}, "changes": [{"step": 4, "weights": {"a": 2, "b": 1, "c": 0}}]},
    "shuffle": "blocks",
    "lanes": 4,
}


def test_a_run_of_mixed_blocks_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    how = config(8, checkpoint={"every": 1}, data=MIXED)
    run(tmp_path / "whole", how, Several())
    with interrupted(before=3):
        run(tmp_path / "cut", how, Several())
    with interrupted(before=6):
        run(tmp_path / "cut", how, Several())
    run(tmp_path / "cut", how, Several())
    whole, cut = (
        [e["loss"] for e in events.read_events(tmp_path / name / "events.jsonl")] for name in ("whole", "cut")
    )
    assert whole == cut
    run(tmp_path / "other", config(8, data={**MIXED, "window": 1}), Several())
    assert [e["loss"] for e in events.read_events(tmp_path / "other" / "events.jsonl")] != whole


def test_a_plan_that_is_no_pure_function_is_kept_with_the_checkpoint_and_told_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(StreamPlan, "state", lambda self, step, rows: {"step": step, "rows": [rows.start, rows.stop]})
    monkeypatch.setattr(StreamPlan, "resume", lambda self, states: told.append(states))
    how = config(4, checkpoint={"every": 2})
    with interrupted(before=3):
        run(tmp_path, how)
    assert told == []
    run(tmp_path, how)
    assert told == [[{"step": 2, "rows": [0, 8]}]]


# guards ---------------------------------------------------------------------------------------------------------------


def test_what_a_guard_finds_is_told_as_a_proof_would_and_points_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    with pytest.raises(GuardError) as caught:
        run(tmp_path, config().model_copy(update={"recipe": "my task.py:Mine"}))
    assert caught.value.fault == "Parameters do not train"
    assert str(caught.value).splitlines()[1:] == [
        "  likely: Parameters do not train",
        "  more: unisono explain parameters-do-not-train",
        "  to locate it, run `unisono prove 'my task.py:Mine'` with the settings of this run",
    ]
