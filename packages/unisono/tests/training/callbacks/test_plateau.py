"""A learning rate that falls on a plateau: when, that a resume and other layouts agree on it, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import TransformerTask
from unisono.callback import Callback
from unisono.config.schema import schedules
from unisono.config.schema.run import RunConfig
from unisono.launch.resolving.preflight import preflight
from unisono.observe import events
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.training.callbacks.build import build_callbacks
from unisono.training.callbacks.plateau import FallOnPlateau

PLATEAU = {"kind": "plateau", "patience": 2, "min_delta": 1.0, "factor": 0.5, "warmup": 2, "floor": 0.2}
RATE = 1e-2


def config(
    steps: int = 9, world_size: int = 1, evaluation: Any = None, progress: Any = False, **schedules: Any
) -> RunConfig:
    return configuration(
        train={"steps": steps, "global_batch": 8},
        schedules=schedules or {"lr": PLATEAU},
        optim={"kind": "adamw", "lr": RATE},
        eval={"every": 1, "at_end": False} if evaluation is None else evaluation,
        checkpoint={"every": 4, "at_end": True},
        layout=runs.layout("ddp" if world_size > 1 else "single"),
        observe={"progress": progress},
    )


def train(folder: Path, how: RunConfig) -> runs.Result:
    return runs.train(folder, how, TransformerTask(), callbacks=build_callbacks(how, TransformerTask()))


def rates(folder: Path) -> dict[int, float]:
    found = events.step_events(events.read_events(folder / "events.jsonl"))
    return {event["step"]: event["lr"] / RATE for event in found}


def test_the_rate_falls_after_so_many_evaluations_without_an_improvement_down_to_the_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, config(progress="plain"))
    said = [line.split(" of its peak: ") for line in capsys.readouterr().out.splitlines() if "of its peak" in line]
    assert [where for where, _ in said] == [
        f"step {step}: the learning rate falls to {factor:g}" for step, factor in ((3, 0.5), (5, 0.25), (7, 0.2))
    ], "and no more at the floor"
    assert {why for _, why in said} == {"loss has not improved for 2 evaluations"}
    losses = [event["loss"] for event in events.read_events(tmp_path / "events.jsonl") if event.get("eval")]
    assert len({*losses}) == 9, "nothing was trained"
    # the first evaluation is the best one; then it falls after every second
    assert list(rates(tmp_path).values()) == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2])


def test_it_does_not_fall_while_the_metric_improves(tmp_path: Path) -> None:
    train(tmp_path, config(lr={**PLATEAU, "min_delta": 0.0, "patience": 3}))
    assert set(rates(tmp_path).values()) == {0.5, 1.0}


def test_a_resumed_run_has_fallen_as_often_and_ends_bit_for_bit(tmp_path: Path) -> None:
    train(tmp_path / "whole", config())
    with runs.interrupted(before=6):
        train(tmp_path / "resumed", config())
    train(tmp_path / "resumed", config())
    assert rates(tmp_path / "resumed") == rates(tmp_path / "whole")
    mine, reference = (runs.saved_arrays(tmp_path / name) for name in ("resumed", "whole"))
    assert mine.keys() == reference.keys()
    assert all(np.array_equal(mine[name], reference[name]) for name in reference)


def test_a_small_loss_that_halves_improves_and_a_large_one_that_only_rounds_does_not() -> None:
    """With an absolute `min_delta` of 1e-4 a loss of 1e-4 could never improve, so that the rate fell while it did."""
    made = schedules.Plateau(kind="plateau", patience=1)
    halving, rounding = FallOnPlateau(made), FallOnPlateau(made)
    for step in range(4):
        halving.on_evaluation(step, {"loss": 1e-4 * 0.5**step})
        rounding.on_evaluation(step, {"loss": 1e4 * (1 - 1e-6 * step)})
    assert (halving.count(), rounding.count()) == (0, 3)


class Rates(Callback):
    """Keeps the learning rates that this process used."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        self.seen.append(values["lr"])


def rates_of_a_rank(place: ProcessInfo, group: Communicator, folder: Path) -> list[float]:
    how, rates = config(world_size=place.world_size), Rates()
    callbacks = [*build_callbacks(how, TransformerTask()), rates]
    runs.train(folder, how, TransformerTask(), place, group, callbacks)
    return rates.seen


def test_all_ranks_fall_at_once_and_as_one_process_does(tmp_path: Path) -> None:
    alone = processes.alone(rates_of_a_rank, tmp_path / "alone")
    assert len(set(alone)) == 4, "it never fell"
    assert processes.ranks(rates_of_a_rank, 2, tmp_path / "two") == [alone, alone]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"evaluation": {}}, r"schedules\.lr=plateau needs evaluations, but eval\.every is null"),
        ({"clip_norm": PLATEAU}, r"schedules\.clip_norm: only lr can fall on a plateau"),
    ],
)
def test_a_plateau_that_could_never_be_seen_is_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        config(**more)


class WithoutHeldOut(TransformerTask):
    def held_out(self) -> None:
        return None


def test_a_plateau_of_nothing_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedules\.lr=plateau has nothing to look at, .* define held_out\(\)"):
        preflight(WithoutHeldOut(), config())
    with pytest.raises(ConfigError, match=r"schedules\.lr\.metric=acuracy: .* did you mean 'accuracy'"):
        train(tmp_path, config(lr={**PLATEAU, "metric": "acuracy"}))
    assert not (tmp_path / "events.jsonl").exists()
