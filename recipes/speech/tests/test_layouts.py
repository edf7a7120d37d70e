"""Two processes train what one trains: a row without audio among the others, each term with its own count."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import SGD, Trace, assert_same, configuration, traces, without_gradient
from recipes.speech.tests import made
from unisono.config.schema.run import RunConfig
from unisono_speech.settings import Manifest
from unisono_speech.task import Speech

TOLERANCE = 1e-12
SLOW = ("single m3", "single m1", "ddp×2 m3", "fsdp×2", "fsdp×2 m3", "ddp×4", "ddp×4 m1", "hsdp 2×2", "hsdp 2×2 m1")


def written(path: Path) -> Speech:
    """Thirty conversations, of which a third has no audio: all those of one rank in the first batch."""
    made.folder(path, speakers=2, clips=3)
    entries = []
    for number in range(30):
        answer = [{"type": "audio", "audio_url": f"{number % 2}_{number % 3}.wav"}]
        silent = 6 <= number < 14 or number % 7 == 0
        asked = {"role": "user", "content": "say " + "la" * (number % 5 + 1)}
        said = {"role": "assistant", "content": "no " * (number % 3 + 1) if silent else answer}
        entries.append({"messages": [asked, said], "start_index": 1, "speaker": "a"})
    (path / "m.json").write_text(json.dumps(entries), encoding="utf-8")
    data = Manifest(kind="manifest", path=path / "m.json", held_out=0.1, codec=made.CODEC, cache=path / "cache")
    return made.task(path / "cache", data=data)


def config(task: Speech, layout: str) -> RunConfig:
    world, given = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, **given},
        train={"epochs": 27 / len(task.data()), "precision": "fp64", "clip_norm": 0.5},
        data={"shuffle": "none"}, optim=SGD, eval={"micro_batch": 2},
    )  # fmt: skip


def run(task: Speech, layouts: tuple[str, ...]) -> dict[str, Trace]:
    found: dict[str, Trace] = {}
    for world in (1, 2, 4):
        chosen = [name for name in layouts if LAYOUTS[name][0] == world]
        asked = [(task, config(task, name)) for name in chosen]
        if asked:
            ranks = [processes.alone(traces, asked)] if world == 1 else processes.run(traces, world, asked)
            found |= dict(zip(chosen, ranks[0], strict=True))
    return found


def agree(mine: Trace, reference: Trace) -> None:
    assert len(set(reference.losses)) == 3
    assert not without_gradient(reference)
    assert all(np.any(reference.parameters[name] != before) for name, before in reference.before.items())
    assert_same(mine, reference, TOLERANCE)


def test_two_processes_train_what_one_trains_though_one_of_them_has_no_audio(tmp_path: Path) -> None:
    task = written(tmp_path)
    source = task.data()
    silent = [not any(part for part in source[n].clips) for n in range(12)]
    assert all(silent[6:]) and not all(silent[:6])  # the second process's rows of the first batch, and the first's
    found = run(task, ("single", "ddp×2"))
    agree(found["ddp×2"], found["single"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW)
def test_every_layout_trains_what_one_process_trains(layout: str, matrix: dict[str, Trace]) -> None:
    agree(matrix[layout], matrix["single"])


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return run(written(tmp_path_factory.mktemp("layouts")), ("single", *SLOW))
