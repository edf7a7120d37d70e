"""The example of a recipe outside of the package: found by its entry point, trained, predicted and proved."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unisono
from unisono.cli import main
from unisono.config.code import recipes

soundfile = pytest.importorskip("soundfile")
ROOT = Path(__file__).parents[1] / "examples" / "esc10"
KINDS = {"hum": 200.0, "whistle": 3000.0, "hiss": None}
SMALL = {
    "layout.world_size": 1, "layout.device": "cpu", "layout.threads": 1, "observe.progress": False, "train.steps": 40,
    "train.global_batch": 12, "eval.every": None, "model.width": 8, "task.seconds": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three kinds of sound, four folds of three clips each."""
    folder = tmp_path_factory.mktemp("clips")
    lines = ["file,category,fold"]
    for kind, pitch in KINDS.items():
        for number in range(12):
            rng = unisono.generator("clip", kind, number)
            noise, time = rng.standard_normal(44_100), np.arange(44_100) / 44_100
            sound = 0.02 * noise + (
                0.3 * noise if pitch is None else np.sin(2 * np.pi * pitch * (1 + number / 60) * time)
            )
            soundfile.write(folder / f"{kind}{number}.wav", 0.5 * sound, 44_100)
            lines.append(f"{kind}{number}.wav,{kind},{number % 4 + 1}")
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """The recipe is found as if its package were installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        import esc10

        entry = SimpleNamespace(value="esc10:RECIPE", module="esc10", load=lambda: esc10.RECIPE)
        known = dict(recipes._entry_points())
        recipes.find_recipe.cache_clear()
        patch.setattr(recipes, "_entry_points", lambda: {**known, "esc10": entry})
        yield
    recipes.find_recipe.cache_clear()
    sys.modules.pop("esc10", None)


@pytest.fixture(scope="module")
def result(installed: None, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runs = tmp_path_factory.mktemp("runs")
    return unisono.train("esc10", {**SMALL, "data.folder": str(clips), "run.dir": str(runs), "run.name": "run"})


def test_it_learns_and_predicts_the_clips_of_the_fold_that_it_has_not_seen(
    result: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result.evaluation["accuracy"] >= 0.8
    assert main.main(["predict", str(result.folder)]) == 0
    with (result.folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert (len(rows), {row["true"] for row in rows}) == (9, set(KINDS))
    right = sum(row["predicted"] == row["true"] for row in rows) / len(rows)
    assert right == pytest.approx(result.evaluation["accuracy"])


def test_its_verb_says_what_a_sound_file_is_without_its_data(
    result: Any, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = tmp_path / "sound.wav"
    sound.write_bytes((clips / "hiss3.wav").read_bytes())
    away = clips.rename(clips.with_name("away"))
    try:
        assert main.main(["listen", str(result.folder), str(sound)]) == 0
    finally:
        away.rename(clips)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("  hiss")


def test_only_clips_to_train_on_are_cut_and_hidden_in_part(result: Any) -> None:
    task = unisono.open_run(result.folder).task
    record = task.held_out()[0]
    rng = unisono.generator("test")
    whole = task.sample(record, unisono.SampleContext(rng, training=False))["spectrum"]
    part = task.sample(record, unisono.SampleContext(rng, training=True))["spectrum"]
    assert whole.shape == (64, 42) and part.shape == (64, 21)
    assert not (whole == 0).any() and (part == 0).any()


def test_a_fold_that_is_not_there_is_refused(installed: None, clips: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check", "esc10", f"data.folder={clips}", "data.fold=7"]) == 2
    assert "data.fold=7: the folds are [1, 2, 3, 4]" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_compute_what_one_computes(clips: Path) -> None:
    words = ["layouts=[ddp:2]", "vary=[accumulate]", "steps=2", "model.width=8", f"data.folder={clips}"]
    proved = unisono.prove(f"{ROOT / 'esc10' / 'task.py'}:Esc10", words)
    assert proved.passed, proved
