"""An interrupted and resumed run is the one that never stopped: bit for bit on its layout, to the floor on another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import ADAMW, SGD, configuration, distance, interrupted
from packages.unisono.tests.runs import train as train_in
from packages.unisono.tests.tasks import TransformerTask
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.arrays import ArrayReader
from unisono.observe.events import NOTE_KEYS
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Task

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "ddp×4": (4, {"strategy": "ddp"}),
    "fsdp×4": (4, {"strategy": "fsdp"}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
}
STEPS = 8
INTERRUPTED = 5  # after this step; the last checkpoint is that of step 4


def train(
    place: ProcessInfo, group: Communicator, runs: list[tuple[Any, Path, int | None]], tasks: list[Task] | None = None
) -> None:
    """Train each run, to its end or until it is interrupted; of a task of its own, if there are any."""
    for number, (config, folder, until) in enumerate(runs):
        task = tasks[number] if tasks else TransformerTask(TransformerTask.Config(dropout=0.2))
        with interrupted(before=until):
            train_in(folder, config, task, place, group)


def _config(layout: str, optim: Any, precision: str) -> Any:
    world, settings = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, "micro_batch": 3, **settings},
        train={"epochs": (STEPS * 12 - 5) / 27, "precision": precision},
        optim=optim,
        checkpoint={"every": 2},
        observe={"progress": False},
        eval={"every": 3, "micro_batch": 4},
        schedules={"lr": {"kind": "wsd", "warmup": 2, "decay": 3}},
    )


def _go(layout: str, runs: list[tuple[Any, Path, int | None]]) -> None:
    world = LAYOUTS[layout][0]
    if world == 1:
        processes.alone(train, runs)
    else:
        processes.run(train, world, runs)


def final(folder: Path, steps: int = STEPS) -> dict[str, np.ndarray]:
    checkpoint = commit.open_checkpoint(commit.find_checkpoints(folder / "checkpoints")[-1])
    assert checkpoint.step == steps
    reader = ArrayReader(checkpoint.path, checkpoint.arrays)
    return {name: reader.read(name, (0,) * len(shape), shape) for name, shape in reader.shapes.items()}


def events(folder: Path) -> list[dict[str, Any]]:
    kept = ("step", "eval", "loss", "grad_norm", "lr", "accuracy")
    lines = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return [{name: line[name] for name in kept if name in line} for line in lines if not NOTE_KEYS & line.keys()]


OPTIMIZERS = {"adamw": ADAMW, "sgd": SGD}


PRECISIONS = ("fp32", "fp64")
EVERY = [(name, precision) for name in OPTIMIZERS for precision in PRECISIONS]


class Made:
    """Of each layout the run without interruption, and the interrupted ones, not yet resumed, once asked for."""

    def __init__(self, root: Path) -> None:
        self._root, self._layouts = root, set[str]()

    def __call__(self, layout: str, name: str, precision: str, which: str) -> Path:
        if layout not in self._layouts:
            self._layouts.add(layout)
            _go(layout, [run for made in EVERY for run in self._runs(layout, *made)])
        return self._root / f"{layout} {name} {precision} {which}"

    def _runs(self, layout: str, name: str, precision: str) -> list[tuple[Any, Path, int | None]]:
        config, folder = _config(layout, OPTIMIZERS[name], precision), self._root / f"{layout} {name} {precision}"
        return [(config, Path(f"{folder} whole"), None), (config, Path(f"{folder} cut"), INTERRUPTED)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("resume"))


def _moved(interrupted: Path, to: Path) -> Path:
    """A copy of an interrupted run, to be continued."""
    assert [path.name for path in commit.find_checkpoints(interrupted / "checkpoints")] == [
        "step-00000002",
        "step-00000004",
    ]
    return Path(shutil.copytree(interrupted, to / interrupted.name))


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name in ("single", "fsdp×2") else pytest.mark.slow) for name in LAYOUTS]
)
def test_the_same_layout_goes_on_bit_for_bit(made: Made, tmp_path: Path, layout: str) -> None:
    cuts = [_moved(made(layout, *each, "cut"), tmp_path) for each in EVERY]
    runs = [
        (_config(layout, OPTIMIZERS[name], precision), cut, None)
        for (name, precision), cut in zip(EVERY, cuts, strict=True)
    ]
    _go(layout, runs)
    for each, cut in zip(EVERY, cuts, strict=True):
        whole = made(layout, *each, "whole")
        mine, reference = final(cut), final(whole)
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            assert mine[name].dtype == value.dtype
            assert np.array_equal(mine[name], value), f"{cut.name}: {name}"
        assert events(cut) == events(whole)
        assert [event["step"] for event in events(cut) if "eval" not in event] == list(range(1, STEPS + 1))
    assert len({event["loss"] for event in events(whole)}) > STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("single", "fsdp×4"),
        ("fsdp×4", "ddp×2"),
        ("hsdp 2×2", "single"),
        ("ddp×4", "hsdp 2×2"),
        ("fsdp×2", "ddp×4"),
        ("ddp×2", "fsdp×2"),
    ],
)
def test_another_layout_goes_on_to_the_floor(made: Made, tmp_path: Path, before: str, after: str) -> None:
    cuts = [_moved(made(before, "sgd", precision, "cut"), tmp_path) for precision in PRECISIONS]
    _go(after, [(_config(after, SGD, precision), cut, None) for precision, cut in zip(PRECISIONS, cuts, strict=True)])
    for precision, moved in zip(PRECISIONS, cuts, strict=True):
        whole = made("single", "sgd", precision, "whole")
        mine, reference = final(moved), final(whole)
        worst = distance(mine, reference)
        assert max(worst.values()) < {"fp64": 1e-12, "fp32": 1e-5}[precision], max(worst, key=worst.__getitem__)
        for event, expected in zip(events(moved), events(whole), strict=True):
            assert event == pytest.approx(expected, rel={"fp64": 1e-12, "fp32": 1e-5}[precision])
