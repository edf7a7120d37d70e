"""The presets of experiments: each can be trained as it stands, and differs from the baseline in what its name says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from recipes.puzzles.tests.puzzles_for_tests import write_csv
from unisono.config import fingerprint
from unisono.config.code import recipes
from unisono.launch.resolving import resolve
from unisono.optim.schedules import ScheduledScalars
from unisono.task_config import build_task, load_config
from unisono_puzzles.data.generate import sudokus

NAMES = sorted(path.stem for path in (recipes.config_folder("puzzles") / "experiment").glob("*.yaml"))
FAMILIES = {  # beginning of the name -> keys that its presets may change
    "width_": {"model.width", "model.heads"},
    "cycles_": {"model.h_cycles", "model.l_cycles"},
    "layers_": {"model.layers", "model.l_cycles"},
    "puzzles_": {"data.puzzles"},
    "augmentations_": {"data.augmentations"},
    "halt_": {"task.halt_steps", "schedules.halt_exploration"},
    "batch_": {"train.global_batch", "train.steps", "optim.lr", "schedules.lr.warmup"},
    "precision_": {"train.precision"},
    "no_ema": {"ema.decay", "ema.exclude"},
    "ema_": {"ema.exclude"},
    "optim_": {"optim"},
    "lr_": {"optim.lr"},
}


@cache
def settings(name: str) -> dict[str, Any]:
    config, _ = load_config("puzzles", [f"experiment={name}", "data.path=puzzles.csv"])
    return fingerprint.flatten(fingerprint.to_json(config))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "baseline"])
def test_a_preset_differs_from_the_baseline_in_what_its_name_says(name: str) -> None:
    mine, base = settings(name), settings("baseline")
    changed = {key for key in {*mine, *base} if mine.get(key) != base.get(key)}
    (allowed,) = (keys for begins, keys in FAMILIES.items() if name.startswith(begins))
    assert changed and all(any(key == one or key.startswith(f"{one}.") for one in allowed) for key in changed)


def test_every_family_has_a_preset_and_the_baseline_is_the_published_one() -> None:
    assert {begins for begins in FAMILIES if any(name.startswith(begins) for name in NAMES)} == FAMILIES.keys()
    base = settings("baseline")
    kept = {
        "model.width": 512, "model.layers": 2, "model.h_cycles": 3, "model.l_cycles": 6, "model.mixer": "mlp",
        "train.global_batch": 768, "train.steps": 65104, "task.halt_steps": 16, "optim.kind": "adam_atan2",
        "optim.lr": 1e-4, "optim.weight_decay": 1.0, "ema.decay": 0.999, "data.puzzles": 1000,
    }  # fmt: skip
    assert {key: base[key] for key in kept} == kept
    assert base["train.steps"] == 50_000 * 1000 // 768


def test_annealed_exploration_falls_from_0_3_to_0_05() -> None:
    config, _ = load_config("puzzles", ["experiment=halt_annealed", "data.path=puzzles.csv"])
    scalars = ScheduledScalars(config, config.train.steps)
    first, last = (scalars(step)["halt_exploration"] for step in (0, config.train.steps))
    assert (first, last) == (pytest.approx(0.3), pytest.approx(0.05))


@pytest.mark.parametrize(
    "name", [name if name == "baseline" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_a_preset_can_be_trained_as_it_stands(name: str, tmp_path: Path) -> None:
    """What `unisono check` does, on a file of a few puzzles."""
    write_csv(tmp_path / "puzzles.csv", sudokus(9, 20, (40, 45), seed=1))
    words = [f"experiment={name}", f"data.path={tmp_path / 'puzzles.csv'}", f"data.cache={tmp_path}", "data.puzzles=8"]
    words += ["layout.device=cpu", f"run.dir={tmp_path}"]
    config, _ = load_config("puzzles", words)
    run, data = resolve.check_run(config, build_task(config))
    assert run.world_size == 1 and data.steps == config.train.steps and data.facts["puzzles"] == 8
