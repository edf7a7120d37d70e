"""Scheduled scalars in a run: what tasks, evaluations and events are told of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.tasks import LinearTask
from packages.unisono.tests.test_trainer import config, run
from unisono.observe import events
from unisono.optim.schedules import ScheduledScalars
from unisono.task import Context

# scheduled scalars ----------------------------------------------------------------------------------------------------


def test_learning_rate_and_clipping_are_always_there_unless_nothing_is_clipped() -> None:
    how = config(optim={"kind": "sgd", "lr": 0.3, "weight_decay": 0.02}, train={"clip_norm": 2.0})
    assert [ScheduledScalars(how, 5)(step) for step in (0, 4)] == [{"lr": 0.3, "clip_norm": 2.0}] * 2
    assert ScheduledScalars(config(optim={"kind": "sgd", "lr": 0.3}, train={"clip_norm": None}), 5)(0) == {"lr": 0.3}


@pytest.mark.parametrize(
    ("name", "peak"), [("lr", 0.4), ("weight_decay", 0.02), ("clip_norm", 2.0), ("exploration", 8.0)]
)
def test_a_schedule_scales_the_largest_value(name: str, peak: float) -> None:
    own = {"peak": peak} if name == "exploration" else {}
    how = config(
        optim={"kind": "sgd", "lr": 0.4, "weight_decay": 0.02},
        train={"clip_norm": 2.0},
        schedules={name: {"kind": "linear", "warmup": 2, "floor": 0.5, **own}},
    )
    values = [ScheduledScalars(how, 4)(step)[name] for step in range(4)]
    assert values == pytest.approx([0.5 * peak, peak, peak, 0.75 * peak])


class Curious(LinearTask):
    """A task that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Context] = []

    def held_out(self) -> Any:
        return self.data()[:4]

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        self.told.append(context)
        return super().outputs(model, batch, context)


def test_a_task_is_told_its_own_scalars_of_every_step_and_an_evaluation_those_that_come_next(tmp_path: Path) -> None:
    task, own = Curious(), {"kind": "linear", "peak": 4.0}
    run(tmp_path, config(4, schedules={"exploration": own}, eval={"every": 2, "at_end": False}), task)
    trained = {context.step: context.scalars["exploration"] for context in task.told if context.training}
    assert trained == {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}
    evaluated = {c.step: c.scalars["exploration"] for c in task.told if not c.training and c.step}
    assert evaluated[2] == 2.0
    recorded = [e["exploration"] for e in events.read_events(tmp_path / "events.jsonl") if not e.get("eval")]
    assert recorded == [4.0, 3.0, 2.0, 1.0]


def test_the_schedule_of_the_learning_rate_is_in_the_events(tmp_path: Path) -> None:
    how = config(4, optim={"kind": "sgd", "lr": 0.4}, schedules={"lr": {"kind": "linear"}})
    run(tmp_path, how, LinearTask())
    assert [event["lr"] for event in events.read_events(tmp_path / "events.jsonl")] == pytest.approx(
        [0.4, 0.3, 0.2, 0.1]
    )
