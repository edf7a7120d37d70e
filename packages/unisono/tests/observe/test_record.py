"""What is recorded of a step and of an evaluation, and by whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from unisono.config.schema.run import Observe
from unisono.engines.observers import StepResult
from unisono.observe import events, trackers
from unisono.observe.progress import Speed
from unisono.observe.run_record import RunRecord
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError

SPEED = Speed("tokens", 2000.0, None, 0.25, 0.5)
SCALARS = {"lr": 0.1, "clip_norm": 1.0}


def result(loss: float = 3.0, terms: Mapping[str, float] | None = None, **metrics: float) -> StepResult:
    return StepResult(loss, terms or {"next": loss}, metrics, {"tokens": 1000.0, "rows": 8.0}, grad_norm=1.5)


def record(folder: Path, first_step: int = 0, rank: int = 0, **observe: Any) -> RunRecord:
    return RunRecord(folder, Observe(**observe), ProcessInfo(rank, rank + 1), first_step, 4)


def step_event(folder: Path, done: StepResult, scalars: Mapping[str, float] = SCALARS, how: Speed = SPEED) -> Any:
    """What the file says of one step."""
    with record(folder) as recording:
        recording.step(1, done, scalars, how)
    (event,) = events.read_events(folder / "events.jsonl")
    return event


def eval_event(folder: Path, done: StepResult) -> Any:
    """What the file says of one evaluation."""
    with record(folder) as recording:
        recording.evaluation(2, done.values, rows=11, seconds=0.5)
    (event,) = events.read_events(folder / "events.jsonl")
    return event


# the file -------------------------------------------------------------------------------------------------------------


def test_a_step_is_recorded_with_loss_learning_rate_gradient_and_speed(tmp_path: Path) -> None:
    assert step_event(tmp_path, result()) == {
        "step": 1, "loss": 3.0, "lr": 0.1, "clip_norm": 1.0, "grad_norm": 1.5, "seconds": 0.5,
        "tokens_per_second": 2000.0, "data_wait": 0.25,
    }  # fmt: skip


def test_the_first_steps_that_lack_samples_are_told_whoever_was_to_make_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record(tmp_path) as recording:
        for step in range(1, 7):
            work = {"tokens": 1000.0, "rows": 8.0, "masked": float(step % 3)}
            recording.step(step, StepResult(3.0, {"next": 3.0}, {}, work, grad_norm=1.5), SCALARS, SPEED)
    told = [line for line in capsys.readouterr().out.splitlines() if "could not be built" in line]
    assert [line.partition(" could")[0] for line in told] == [
        "step 1: 1 sample",
        "step 2: 2 samples",
        "step 4: 1 sample",
    ]
    assert "events.jsonl" in told[-1]
    assert [event.get("masked") for event in events.read_events(tmp_path / "events.jsonl")] == [1, 2, None, 1, 2, None]


def test_metrics_scheduled_scalars_and_known_utilisation_of_a_step_are_recorded_by_name(tmp_path: Path) -> None:
    scalars = {**SCALARS, "exploration": 0.3, "weight_decay": 0.02}
    event = step_event(tmp_path, result(accuracy=0.75), scalars, Speed("tokens", 1.0, 0.5, 0.0, 1.0))
    assert (event["accuracy"], event["exploration"], event["weight_decay"], event["mfu"]) == (0.75, 0.3, 0.02, 0.5)


@pytest.mark.parametrize("of", [step_event, eval_event])
def test_terms_are_recorded_if_there_are_several_and_a_single_one_is_the_loss(tmp_path: Path, of: Any) -> None:
    (tmp_path / "one").mkdir()
    event = of(tmp_path, result(3.0, {"next": 2.0, "length": 1.0}))
    assert {name: value for name, value in event.items() if "/" in name} == {"loss/next": 2.0, "loss/length": 1.0}
    assert not any("/" in name for name in of(tmp_path / "one", result(3.0, {"next": 3.0})))


def test_an_evaluation_is_recorded_as_one_and_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = eval_event(tmp_path, result(2.0, accuracy=0.5))
    assert capsys.readouterr().out == "eval after step 2: loss 2.0000  accuracy 0.5000  (11 held-out rows, 0.5 s)\n"
    assert event == {"step": 2, "eval": True, "loss": 2.0, "accuracy": 0.5, "rows": 11, "seconds": 0.5}


# the console ----------------------------------------------------------------------------------------------------------


def test_without_progress_the_console_is_silent_and_the_file_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with record(tmp_path, progress=False) as recording:
        recording.step(1, result(), SCALARS, SPEED)
        recording.evaluation(1, result().values, 11, 0.5)
        recording.say("a line")
    assert capsys.readouterr() == ("", "")
    assert len(events.read_events(tmp_path / "events.jsonl")) == 2


def test_other_ranks_leave_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with record(tmp_path, rank=1, trackers=["tensorboard"]) as recording:
        recording.say("a line")
        recording.step(1, result(), SCALARS, SPEED)
        recording.evaluation(1, result().values, 11, 0.5)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


# TensorBoard ----------------------------------------------------------------------------------------------------------


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: (step, value) by name."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = accumulator.EventAccumulator(str(folder / "tensorboard"))
    shown.Reload()
    return {name: [(point.step, point.value) for point in shown.Scalars(name)] for name in shown.Tags()["scalars"]}


@pytest.mark.needs("tensorboard")
def test_tensorboard_shows_what_the_file_says(tmp_path: Path) -> None:
    with record(tmp_path, trackers=["tensorboard"]) as recording:
        recording.step(1, result(3.0, accuracy=0.5), SCALARS, SPEED)
        recording.step(2, result(2.0, accuracy=0.75), SCALARS, SPEED)
        recording.evaluation(2, result(2.5, accuracy=0.25).values, 11, 0.5)
    shown = curves(tmp_path)
    assert shown["loss"] == [(1, 3.0), (2, 2.0)]
    assert shown["accuracy"] == [(1, 0.5), (2, 0.75)]
    assert (shown["eval/loss"], shown["eval/accuracy"]) == ([(2, 2.5)], [(2, 0.25)])
    assert {"lr", "grad_norm", "data_wait", "tokens_per_second"} <= shown.keys()
    assert "eval/eval" not in shown


@pytest.mark.needs("tensorboard")
def test_tensorboard_takes_back_what_a_resumed_run_makes_again(tmp_path: Path) -> None:
    with record(tmp_path, trackers=["tensorboard"]) as recording:
        for step in (1, 2, 3):
            recording.step(step, result(float(step)), SCALARS, SPEED)
    (earlier,) = (tmp_path / "tensorboard").iterdir()
    earlier.rename(earlier.with_name("events.out.tfevents.1.earlier"))  # names of one second have no order
    with record(tmp_path, first_step=1, trackers=["tensorboard"]) as recording:
        for step in (2, 3, 4):
            recording.step(step, result(10.0 * step), SCALARS, SPEED)
    assert curves(tmp_path)["loss"] == [(1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]


def test_a_missing_tensorboard_is_told_with_how_to_get_it_and_only_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    (tmp_path / "events.jsonl").write_text('{"step": 1}\n')
    said = r"^observe\.trackers=tensorboard needs tensorboard: pip install 'unisono\[tensorboard\]'$"
    with pytest.raises(ConfigError, match=said):
        record(tmp_path, trackers=["tensorboard"])
    assert (tmp_path / "events.jsonl").read_text() == '{"step": 1}\n', "the events stay as they were"
    assert step_event(tmp_path, result())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
