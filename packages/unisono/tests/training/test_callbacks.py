"""Callbacks of a user's: when they are called, what they may ask for, and what becomes of what they raise."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import PositiveInt, ValidationError

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import checkpoints, configuration, evaluations
from packages.unisono.tests.tasks import TransformerTask
from unisono.callback import Callback, CallbackResult, Evaluate, RunInfo, Save, Stop
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.saver import Saver
from unisono.config.schema import Settings
from unisono.config.schema.run import RunConfig
from unisono.launch.resolving.preflight import preflight
from unisono.observe import events
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import CallbackError, ConfigError, Preempted
from unisono.supervise import preemption
from unisono.training.callbacks.build import build_callbacks, name_user_callbacks
from unisono.training.callbacks.early_stopping import EarlyStopping


def config(steps: int = 6, **groups: Any) -> RunConfig:
    train = {"steps": steps, "global_batch": 8}
    return configuration(**{"observe": {"progress": False}, **groups, "train": train})


class Recording(Callback):
    """Keeps what it was called with, and asks for what it was given."""

    def __init__(self, asks: Mapping[tuple[str, int], CallbackResult] | None = None) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.values: dict[tuple[str, int], Any] = {}
        self.asks = asks or {}

    def _called(self, point: str, step: int, values: Any = None) -> CallbackResult:
        self.seen.append((point, step))
        self.values[point, step] = values
        return self.asks.get((point, step))

    def on_start(self, run: RunInfo) -> CallbackResult:
        return self._called("start", run.first, run)

    def on_step(self, step: int, values: Mapping[str, float]) -> CallbackResult:
        return self._called("step", step, dict(values))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> CallbackResult:
        return self._called("evaluation", step, dict(values))

    def on_save(self, step: int, checkpoint: Path) -> CallbackResult:
        return self._called("save", step, checkpoint)

    def on_end(self, step: int, reason: str) -> None:
        self._called("end", step, reason)


def run(folder: Path, how: RunConfig, *callbacks: Callback) -> runs.Result:
    return runs.train(folder, how, TransformerTask(), callbacks=callbacks)


# when -----------------------------------------------------------------------------------------------------------------


def test_a_callback_is_called_at_every_point_with_what_the_events_say(tmp_path: Path) -> None:
    one = Recording()
    groups = {"eval": {"every": 2, "at_end": False}, "checkpoint": {"every": 2, "at_end": False, "background": False}}
    run(tmp_path, config(4, **groups), one)
    assert one.seen == [
        ("start", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("save", 2), ("step", 3), ("step", 4),
        ("evaluation", 4), ("save", 4), ("end", 4),
    ]  # fmt: skip
    told = {event["step"]: event for event in events.step_events(events.read_events(tmp_path / "events.jsonl"))}
    for step in range(1, 5):
        values = one.values["step", step]
        assert {"loss", "accuracy", "grad_norm", "lr"} <= values.keys()
        assert all(told[step][name] == value for name, value in values.items() if name in told[step])
    assert len({one.values["step", step]["loss"] for step in range(1, 5)}) == 4, "nothing was trained"
    assert one.values["save", 2] == tmp_path / "checkpoints" / "step-00000002"
    assert one.values["end", 4] == "finished"


def test_a_save_beside_the_steps_is_reported_once_it_is_whole_and_before_the_end(tmp_path: Path) -> None:
    one = Recording()
    run(tmp_path, config(4, checkpoint={"every": 2}), one)
    points = [point for point, _ in one.seen]
    assert [step for point, step in one.seen if point == "save"] == [2, 4]
    assert points.index("end") == len(points) - 1


def test_a_run_that_fails_ends_its_callbacks_with_that_reason(tmp_path: Path) -> None:
    class Failing(TransformerTask):
        def summary(self, values: Mapping[str, float]) -> dict[str, float]:
            raise ZeroDivisionError

    one = Recording()
    with pytest.raises(ZeroDivisionError):
        runs.train(tmp_path, config(3, eval={"every": 2}), Failing(), callbacks=[one])
    assert one.values["end", 2] == "failed"


def test_a_signal_that_comes_while_a_save_that_was_due_is_written_does_not_lose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "which is not saved: ; the newest checkpoint is from step 0", and saved it while it left."""
    begin, write, came = Saver.save, commit.save_checkpoint, False

    def save(saver: Saver, snapshot: Snapshot) -> None:
        nonlocal came
        begin(saver, snapshot)
        came = True

    def write_slowly(*given: Any, **named: Any) -> Path:
        time.sleep(0.1)
        return write(*given, **named)

    monkeypatch.setattr(Saver, "save", save)
    monkeypatch.setattr(commit, "save_checkpoint", write_slowly)
    monkeypatch.setattr(preemption, "seconds_since_signal", lambda: 0.0 if came else None)
    one = Recording()
    with pytest.raises(Preempted, match=r"preempted after step 2 of 6, which is saved$"):
        run(tmp_path, config(checkpoint={"every": 2}), one)
    assert checkpoints(tmp_path) == [2]
    assert ("save", 2) in one.seen


# what it may ask for --------------------------------------------------------------------------------------------------


def test_a_run_is_stopped_saved_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = config(6, observe={"progress": True}, checkpoint={"every": 100})
    result = run(tmp_path, how, Recording({("step", 3): Stop("enough")}))
    assert (result.step, result.stopped) == (3, "Recording asks to stop: enough")
    assert checkpoints(tmp_path) == [3]
    output = capsys.readouterr().out
    assert "step 3: Recording asks to stop: enough\n" in output
    assert "stopped after step 3 of 6: Recording asks to stop: enough. Resume with:\n  " in output
    (note,) = [event for event in events.read_events(tmp_path / "events.jsonl") if "stopped" in event]
    assert note == {"step": 3, "stopped": "Recording asks to stop: enough"}
    again = run(tmp_path, how, Recording())
    assert (again.step, again.stopped) == (6, "")
    other = tmp_path / "other"
    whole = run(other, how)
    assert (again.loss, again.evaluation) == (whole.loss, whole.evaluation), "a stop changes no bit"


def test_a_save_and_an_evaluation_are_made_when_they_are_asked_for(tmp_path: Path) -> None:
    asks: dict[tuple[str, int], CallbackResult] = {("step", 2): [Save("now"), Evaluate()], ("evaluation", 2): Save()}
    run(tmp_path, config(4, checkpoint={"at_end": False}, eval={"at_end": False}), Recording(asks))
    assert (checkpoints(tmp_path), evaluations(tmp_path)) == ([2], [2])


@pytest.mark.parametrize("point", ["evaluation", "save"])
def test_a_stop_may_be_asked_for_at_any_point(tmp_path: Path, point: str) -> None:
    how = config(6, eval={"every": 2}, checkpoint={"every": 2, "background": False})
    assert run(tmp_path, how, Recording({(point, 2): Stop()})).step == 2
    assert checkpoints(tmp_path) == [2]


def test_what_was_asked_for_by_a_save_that_ended_later_is_done_at_the_next_step(tmp_path: Path) -> None:
    result = run(tmp_path, config(40, checkpoint={"every": 2, "keep": 50}), Recording({("save", 2): Stop()}))
    assert 2 < result.step < 40
    assert checkpoints(tmp_path)[-1] == result.step


# faults ---------------------------------------------------------------------------------------------------------------


class Failing(Recording):
    """Raises at one point, on one rank."""

    def __init__(self, point: str, rank: int = 0, error: type[Exception] = ZeroDivisionError) -> None:
        super().__init__()
        self.point, self.rank, self.error = point, rank, error
        self.here = 0

    def on_start(self, run: RunInfo) -> CallbackResult:
        self.here = run.rank
        return super().on_start(run)

    def _called(self, point: str, step: int, values: Any = None) -> CallbackResult:
        if point == self.point and self.here == self.rank:
            raise self.error("by zero")
        return super()._called(point, step, values)


POINTS = {
    "start": "on_start after step 0", "step": "on_step after step 1", "evaluation": "on_evaluation after step 2",
    "save": "on_save after step 2", "end": "on_end after step 4",
}  # fmt: skip
SHORT: dict[str, Any] = {"eval": {"every": 2}, "checkpoint": {"every": 2, "background": False}}


@pytest.mark.parametrize("point", POINTS)
def test_what_a_callback_raises_ends_the_run_with_its_name_and_the_point(tmp_path: Path, point: str) -> None:
    with pytest.raises(CallbackError) as caught:
        run(tmp_path, config(4, **SHORT), Failing(point))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"callback Failing on rank 0, {POINTS[point]}: ZeroDivisionError: by zero"
    assert {line.partition(",")[0] for line in lines if line.startswith("  File ")} == {f'  File "{__file__}"'}
    assert caught.value.exit_code == 1


def test_a_mistake_that_a_callback_reports_is_told_without_a_traceback_and_what_is_no_wish_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"^callback Failing on rank 0, on_step after step 1: by zero$"):
        run(tmp_path / "a", config(4), Failing("step", error=ConfigError))
    told = r"on_step after step 1: TypeError: returned 'stop'; a callback returns None"
    with pytest.raises(CallbackError, match=told):
        run(tmp_path / "b", config(4), Recording({("step", 1): "stop"}))  # type: ignore[dict-item]


def test_the_log_of_the_run_has_the_traceback_of_a_callback(tmp_path: Path) -> None:
    with pytest.raises(CallbackError):
        run(tmp_path, config(2), Failing("step"))
    assert "ZeroDivisionError: by zero" in (tmp_path / "logs" / "rank-00000.log").read_text()
    assert json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])["step"] == 1


# state ----------------------------------------------------------------------------------------------------------------


class Counting(Callback):
    """Counts steps over all starts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.count += 1

    def state(self) -> Any:
        return {"count": self.count}

    def load_state(self, state: Any) -> None:
        self.count = state["count"]


def test_the_state_of_callbacks_is_that_of_the_checkpoint_from_which_a_run_resumes(tmp_path: Path) -> None:
    how = config(6, checkpoint={"every": 2, "keep": 9})
    with runs.interrupted(before=5):
        run(tmp_path, how, Counting(), Counting())
    assert commit.read_manifest(commit.find_checkpoints(tmp_path / "checkpoints")[-1]).state["callbacks"] == {
        "Counting": {"count": 4}, "Counting 2": {"count": 4},
    }  # fmt: skip
    first, second = Counting(), Counting()
    run(tmp_path, how, first, second)
    assert (first.count, second.count) == (6, 6)


def test_a_checkpoint_without_such_a_state_is_resumed(tmp_path: Path) -> None:
    how = config(6, checkpoint={"every": 2})
    with runs.interrupted(before=3):
        run(tmp_path, how)
    one = Counting()
    run(tmp_path, how, one)
    assert one.count == 4


def test_a_callback_that_saves_nothing_is_told_from_one_that_does() -> None:
    """A proof calls neither, and what the first one has changed is lost on a resume."""
    task: Any = SimpleNamespace(callbacks=lambda: [Recording(), Counting()])
    assert name_user_callbacks(config(), task) == ["Recording (no state() is saved)", "Counting"]


# early stopping -------------------------------------------------------------------------------------------------------


def stopping(**settings: Any) -> EarlyStopping:
    return EarlyStopping(EarlyStopping.Config(**settings))


def verdicts(one: EarlyStopping, *values: float) -> list[bool]:
    return [one.on_evaluation(step, {"loss": value}) is not None for step, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("settings", "values", "stops"),
    [
        ({"patience": 2}, (3.0, 2.0, 2.5, 2.0, 1.0), [False, False, False, True, False]),
        ({"patience": 1}, (3.0, 3.0), [False, True]),
        ({"patience": 1, "min_delta": 0.5}, (3.0, 2.6), [False, True]),
        ({"patience": 1, "mode": "max"}, (1.0, 2.0, 1.5), [False, False, True]),
        ({"patience": 2}, (float("nan"), 2.0, float("nan"), 1.0), [False, False, False, False]),
        ({"patience": 2}, (float("nan"), float("inf")), [False, True]),
    ],
)
def test_a_metric_that_has_not_improved_for_so_many_evaluations_stops(
    settings: dict[str, Any], values: tuple[float, ...], stops: list[bool]
) -> None:
    assert verdicts(stopping(**settings), *values) == stops


def test_a_run_is_stopped_early_and_stays_so_until_it_is_given_more_patience(tmp_path: Path) -> None:
    how = config(20, eval={"every": 1, "at_end": False}, optim={"kind": "sgd", "lr": 1e-12}, checkpoint={"every": 1})
    patient = {"patience": 2, "min_delta": 100.0}
    first = run(tmp_path, how, stopping(**patient))
    assert first.step == 3
    assert first.stopped.startswith("EarlyStopping asks to stop: loss has not improved for 2 evaluations; the best was")
    again = run(tmp_path, how, stopping(**patient))
    assert (again.step, again.stopped) == (3, first.stopped)
    assert run(tmp_path, how, stopping(**{**patient, "patience": 4})).step == 5


def test_a_run_with_patience_stops_without_a_callback_and_its_metric_has_to_be_there(tmp_path: Path) -> None:
    def settings(**more: Any) -> RunConfig:
        patience = {"every": 1, "at_end": False, "patience": 2, **more}
        return config(20, eval=patience, optim={"kind": "sgd", "lr": 1e-12}, checkpoint={"every": 1})

    def start(folder: str, how: RunConfig) -> runs.Result:
        return run(tmp_path / folder, how, *build_callbacks(how, TransformerTask()))

    ended = start("a", settings(metric="accuracy", mode="max"))
    assert ended.step == 3
    assert ended.stopped.startswith("eval.patience asks to stop: accuracy has not improved for 2 evaluations; the best")
    with pytest.raises(ConfigError, match=r"eval\.metric=acuracy: .* did you mean 'accuracy'"):
        start("b", settings(metric="acuracy"))
    for wrong, told in (
        ({"every": None}, "eval.patience needs eval"),
        ({"patience": None, "mode": "max"}, "no effect"),
    ):
        with pytest.raises(ValidationError, match=told):
            settings(**wrong)


class WithoutHeldOut(TransformerTask):
    def held_out(self) -> None:
        return None


def test_early_stopping_without_held_out_rows_is_refused_by_a_check_and_by_a_start(tmp_path: Path) -> None:
    how = config(4, eval={"every": 1, "patience": 2})
    with pytest.raises(ConfigError, match=r"^eval\.patience has nothing to look at, since the task holds out no rows"):
        preflight(WithoutHeldOut(), how)
    assert preflight(TransformerTask(), how).facts["held_out"] > 0
    callback = stopping()
    with pytest.raises(ConfigError, match=r"EarlyStopping has nothing to look at, .* define held_out\(\)"):
        callback.on_start(RunInfo(tmp_path, how, 0, 4))
    callback.on_start(RunInfo(tmp_path, config(4, eval={"every": 1, "harness": ["of the task"]}), 0, 4))


def test_the_metric_of_patience_is_refused_before_the_first_step(tmp_path: Path) -> None:
    how = config(4, eval={"every": 4, "patience": 2, "metric": "acuracy"})
    with pytest.raises(ConfigError, match=r"eval\.metric=acuracy: .* did you mean 'accuracy'"):
        run(tmp_path, how, *build_callbacks(how, TransformerTask()))
    assert not (tmp_path / "events.jsonl").exists() or not (tmp_path / "events.jsonl").read_text()


class Needy(Callback):
    class Config(Settings):
        count: PositiveInt


def test_what_a_callback_cannot_work_with_is_refused(tmp_path: Path) -> None:
    told = r"metric=accuarcy: this task's evaluations have no such metric, did you mean 'accuracy'"
    with pytest.raises(ConfigError, match=told):
        run(tmp_path, config(4, eval={"every": 1}), stopping(metric="accuarcy"))
    with pytest.raises(ConfigError, match=r"eval\.every is null"):
        stopping().check(config(4))
    with pytest.raises(ConfigError, match="Needy needs settings: count"):
        Needy()


# on two processes -----------------------------------------------------------------------------------------------------


class OneSided(Recording):
    """Rank 1 alone asks for a stop."""

    def on_start(self, run: RunInfo) -> CallbackResult:
        self.asks = {("step", 3): Stop("enough")} if run.rank == 1 else {}
        return super().on_start(run)


def together(process: ProcessInfo, communicator: Communicator, folder: Path) -> list[Any]:
    """What each rank sees of a wish of one rank, and of faults of one rank at every point."""
    layout = {"layout": {"strategy": "ddp", "world_size": 2}}
    found: list[Any] = []
    result = runs.train(folder / "stop", config(6, **layout), TransformerTask(), process, communicator, [OneSided()])
    found.append([result.step, result.stopped])
    for point in POINTS:
        try:
            runs.train(
                folder / point, config(4, **layout, **SHORT), TransformerTask(), process, communicator,
                [Failing(point, rank=1)],
            )  # fmt: skip
        except CallbackError as error:
            found.append([str(error).splitlines()[0], error.agreed])
    return found


def test_what_one_rank_asks_for_or_raises_is_everyones(tmp_path: Path) -> None:
    for name in ("stop", *POINTS):
        (tmp_path / name).mkdir()
    first, second = processes.run(together, 2, tmp_path)
    assert first == second
    assert first[0] == [3, "Recording asks to stop: enough (rank 1)".replace("Recording", "OneSided")]
    assert first[1:] == [
        [f"callback Failing on rank 1, {where}: ZeroDivisionError: by zero", True] for where in POINTS.values()
    ]
