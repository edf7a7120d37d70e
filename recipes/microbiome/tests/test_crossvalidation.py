"""Every group is predicted once, by a model that has not seen it; intervals hold the errors of such predictions."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import biom
import numpy as np
import pytest

import unisono
from recipes.microbiome.tests.made import TINY, data
from unisono import RunResult
from unisono.cli import main
from unisono.supervise.step_sync import AS_REQUESTED
from unisono_microbiome.crossvalidation import find_half_width, measure_coverage
from unisono_microbiome.study.simulate import simulate_study


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader((line for line in file if not line.startswith("#q2:")), delimiter="\t"))


def words(folder: Path, **more: Any) -> list[str]:
    settings = data(folder / "cache").model_dump(exclude_unset=True, mode="json")
    known = {
        **{f"data.{key}": value for key, value in settings.items() if key != "kind"},
        **{f"model.{key}": value for key, value in TINY.items()},
        "model.encoder": "taxon", "data.held_out": 0.5, "data.covariates": "[kind]", "layout.world_size": 1,
        "layout.threads": 1, "train.steps": 3, "train.global_batch": 6, "eval.every": "null", "eval.at_end": "false",
        "checkpoint.every": "null", "observe.trackers": "[]", "observe.progress": "false", **more,
    }  # fmt: skip
    return ["task=target", *(f"{key}={value}" for key, value in known.items())]


@pytest.mark.slow
def test_every_group_is_predicted_by_a_model_that_has_not_seen_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cv"
    command = ["crossvalidate", "microbiome", f"out={out}", "draws=2", *words(tmp_path)]
    assert main.main(command) == 0
    said = capsys.readouterr().out
    assert "coverage of 95% intervals with the model's error: " in said
    rows = read(out / "predictions.tsv")
    assert len({row["sample-id"] for row in rows}) == len(rows) == 18
    for fold in ("fold-0", "fold-1"):
        trained_on = {row["group"] for row in rows if row["fold"] != fold}
        assert trained_on.isdisjoint(row["group"] for row in rows if row["fold"] == fold)
    folds = read(out / "folds.tsv")
    assert [row["fold"] for row in folds] == ["0", "1", "mean", "sd", "all samples at once"]
    assert {"target/mae", "target/r2", "forest/mae", "number of reads/mae"} <= folds[0].keys()
    errors = np.array([abs(float(row["true share"]) - float(row["share"])) for row in rows])
    assert float(folds[-1]["target/mae"]) == pytest.approx(errors.mean(), abs=1e-4)

    # Folds that are finished are not trained again.
    steps = [len((out / f"fold-{n}" / "events.jsonl").read_text().splitlines()) for n in range(2)]
    assert main.main(command) == 0
    assert read(out / "predictions.tsv") == rows
    assert [len((out / f"fold-{n}" / "events.jsonl").read_text().splitlines()) for n in range(2)] == steps
    capsys.readouterr()

    # The ensemble predicts new samples, and refuses those that it was trained on.
    study = simulate_study(data(tmp_path / "cache"))
    table = biom.load_table(str(study.table))
    table.update_ids({name: f"new-{name}" for name in table.ids()}, inplace=True)
    (tmp_path / "new.biom").write_text(table.to_json("test"))
    metadata = study.metadata.read_text().replace("\nS", "\nnew-S") if study.metadata else ""
    (tmp_path / "new.tsv").write_text(metadata)
    changes = ["data=study", f"data.table={tmp_path / 'new.biom'}", f"data.metadata={tmp_path / 'new.tsv'}"]
    ensemble = ["predict", str(out / "fold-0"), "ensemble=true", "rows=all", "draws=1", f"out={tmp_path / 'e.tsv'}"]
    assert main.main([*ensemble, "baseline=false", *changes]) == 0
    assert "intervals of share: 95% of unseen groups, by the errors in the folds" in capsys.readouterr().out
    width = json.loads((out / "crossvalidation.json").read_text())["half_width"]
    together = read(tmp_path / "e.tsv")
    assert all(float(row["share_high"]) - float(row["share"]) == pytest.approx(width, abs=1e-5) for row in together)
    alone = []
    for fold in ("fold-0", "fold-1"):
        one = ["predict", str(out / fold), "rows=all", "draws=1", f"out={tmp_path / 'o.tsv'}", "baseline=false"]
        assert main.main([*one, *changes]) == 0
        alone.append([float(row["share"]) for row in read(tmp_path / "o.tsv")])
    assert np.allclose(np.mean(alone, axis=0), [float(row["share"]) for row in together], atol=1e-5)
    assert alone[0] != alone[1]
    capsys.readouterr()
    assert main.main(ensemble) != 0
    assert "were trained on by some of the models" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("data.fold=1", "data.fold: each fold has its own"),
        ("model.from_run=runs/other", "was trained on groups that some of the folds hold out"),
        ("data.held_out=0", "holds out no group"),
        ("data.held_out=0.0", "holds out no group"),
    ],
)
def test_settings_that_folds_cannot_have_are_refused_before_any_is_trained(
    word: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["crossvalidate", "microbiome", f"out={tmp_path / 'cv'}", *words(tmp_path), word]) != 0
    assert told in capsys.readouterr().err
    assert not (tmp_path / "cv").exists()


@pytest.mark.parametrize("why", [AS_REQUESTED, "run.stop_after=2"])
def test_a_fold_that_was_stopped_is_not_scored(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unisono, "train", lambda *_: RunResult(tmp_path, 2, stopped=why))
    assert main.main(["crossvalidate", "microbiome", f"out={tmp_path / 'cv'}", *words(tmp_path)]) != 0
    assert f"fold-0 was stopped after step 2 ({why}), so there are no scores yet" in capsys.readouterr().err


def test_every_group_weighs_the_same_in_an_interval() -> None:
    errors = np.array([1.0, 2.0, 3.0, *[10.0] * 97])
    groups = np.array(["a", "b", "c", *["d"] * 97])
    assert find_half_width(errors, groups, 0.6) == 3.0  # three groups of four, and one that is to come
    assert find_half_width(errors, groups, 0.61) == 10.0
    assert find_half_width(errors, groups, 0.99) == 10.0  # the largest, for want of groups


def test_intervals_hold_their_share_of_groups_drawn_alike() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(200):
        errors, groups = np.abs(rng.normal(size=400)), np.repeat(np.arange(100), 4).astype(str)
        width = find_half_width(errors, groups)
        pooled = {"group": groups, "error": np.abs(rng.normal(size=400)), "half_width": width, "drawn": 0.0}
        held.append(list(measure_coverage(pooled).values()))
    assert np.mean(held, axis=0) == pytest.approx([0.95, 0.0], abs=0.02)
