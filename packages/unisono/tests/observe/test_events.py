"""`events.jsonl`: every step stands in it once, whatever interrupted the run, and everything in it is JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unisono.observe.events import Events, last_evaluation, read_events
from unisono.runtime.errors import RecordError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def written(path: Path, *events: dict[str, Any], first_step: int = 0) -> None:
    """Write these events as one process of a run that had made `first_step` steps."""
    file = Events(path, first_step)
    for event in events:
        file.write(event)
    file.close()


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_event_is_a_line_of_json_that_can_be_read_before_the_file_is_closed(path: Path) -> None:
    file = Events(path)
    file.write({"step": 1, "loss": 0.5})
    file.write({"step": 1, "eval": True, "loss": 0.25})
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 1, "eval": true, "loss": 0.25}\n'
    file.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_hold_becomes_null(path: Path, value: float) -> None:
    written(path, {"step": 1, "loss": value, "lr": 0.1})
    assert path.read_text() == '{"step": 1, "loss": null, "lr": 0.1}\n'


def test_a_resumed_run_takes_back_the_lines_of_steps_that_it_will_make_again(path: Path) -> None:
    written(path, *({"step": step, "try": 1} for step in (1, 2, 3, 4)))
    written(path, {"step": 3, "try": 2}, first_step=2)
    assert read_events(path) == [{"step": 1, "try": 1}, {"step": 2, "try": 1}, {"step": 3, "try": 2}]
    path.write_text('{"step": 1}')  # which lacks its end
    written(path, {"step": 2}, first_step=1)
    assert steps(path) == [1, 2]
    written(path)  # anew
    assert path.read_text() == ""
    assert [found.name for found in path.parent.iterdir()] == ["events.jsonl"]


def test_an_evaluation_after_the_last_saved_step_is_kept_and_a_later_one_is_taken_back(path: Path) -> None:
    written(path, {"step": 2}, {"step": 2, "eval": True}, {"step": 3}, {"step": 3, "eval": True})
    written(path, first_step=2)
    assert read_events(path) == [{"step": 2}, {"step": 2, "eval": True}]


@pytest.mark.parametrize("saved", [[2], [2, 4], [0, 0, 5], [5, 3]])
def test_every_step_stands_once_however_often_a_run_was_interrupted(path: Path, saved: list[int]) -> None:
    for first in [0, *saved]:
        written(path, *({"step": step} for step in range(first + 1, 7)), first_step=first)
    assert steps(path) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("cut", ['{"step": 2, "lo', '{"step": 2', "{", '{"loss": 1.0}', "\0\0\0", "2"])
def test_a_last_line_that_was_cut_off_is_dropped_in_reading_and_on_resume(path: Path, cut: str) -> None:
    path.write_text('{"step": 1}\n' + cut)
    assert read_events(path) == [{"step": 1}]
    written(path, {"step": 2, "again": True}, first_step=1)
    assert path.read_text() == '{"step": 1}\n{"step": 2, "again": true}\n'


def test_the_last_evaluation_is_loss_and_metrics_of_the_newest_one() -> None:
    events = [
        {"step": 1, "eval": True, "loss": 9.0, "rows": 5, "seconds": 1.0},
        {"step": 2, "eval": True, "loss": 8.0, "accuracy": 0.5, "rows": 5, "seconds": 1.0},
        {"step": 3, "loss": 7.0},
    ]
    assert last_evaluation(events) == {"loss": 8.0, "accuracy": 0.5}
    assert last_evaluation(events[2:]) == last_evaluation([]) == {}


def test_a_full_disk_is_told_as_a_checkpoint_that_cannot_be_written(path: Path) -> None:
    events = Events(path)
    events.write({"step": 1})
    events._file.close()
    events._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(
        RecordError, match=rf"{path} cannot be written \(No space left on device\). Free some space"
    ) as told:
        events.write({"step": 2})
    assert told.value.exit_code == 7
    events.close()
    assert [event["step"] for event in read_events(path)] == [1]
