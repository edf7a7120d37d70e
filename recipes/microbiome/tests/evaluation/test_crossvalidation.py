"""Every group is predicted once, by a model that has not seen it; intervals hold the errors of such predictions."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import biom
import numpy as np
import pytest

import unisono
from recipes.microbiome.tests.made import TINY, data
from unisono import RunResult
from unisono.cli import main
from unisono.supervise.step_sync import AS_REQUESTED
from unisono_microbiome.evaluation import crossvalidation, scoring
from unisono_microbiome.evaluation.crossvalidation import (
    combine,
    find_half_width,
    measure_coverage,
    pool,
    reach_level,
    score_pooled,
    tabulate,
    write_predictions,
)  # fmt: skip
from unisono_microbiome.evaluation.predict import PredictedTarget, Predictions, write
from unisono_microbiome.study.library import open_library
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
    assert "coverage of 75% intervals with the model's error: " in said  # of three subjects in the other fold
    rows = read(out / "predictions.tsv")
    assert len({row["sample-id"] for row in rows}) == len(rows) == 18
    for fold in ("fold-0", "fold-1"):
        trained_on = {row["held-out group"] for row in rows if row["fold"] != fold}
        assert trained_on.isdisjoint(row["held-out group"] for row in rows if row["fold"] == fold)
    folds = read(out / "folds.tsv")
    assert [row["fold"] for row in folds] == ["0", "1", "mean", "sd", "all samples at once"]
    assert {"target/mae", "target/r2", "forest/mae", "number of reads/mae"} <= folds[0].keys()
    assert (
        float(folds[-1]["forest/mae"])
        == pytest.approx(  # of samples, where the mean is of folds
            np.average(
                [float(row["forest/mae"]) for row in folds[:2]], weights=[int(row["samples"]) for row in folds[:2]]
            ),
            abs=1e-4,
        )
    )
    errors = np.array([abs(float(row["true share"]) - float(row["predicted share"])) for row in rows])
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
    assert "intervals of share: 86% of unseen groups, by the errors in the folds" in capsys.readouterr().out
    width = json.loads((out / "crossvalidation.json").read_text())["half_width"]
    together = read(tmp_path / "e.tsv")
    name = "predicted share"
    assert all(float(row[f"{name}_high"]) - float(row[name]) == pytest.approx(width, abs=1e-5) for row in together)
    alone = []
    for fold in ("fold-0", "fold-1"):
        one = ["predict", str(out / fold), "rows=all", "draws=1", f"out={tmp_path / 'o.tsv'}", "baseline=false"]
        assert main.main([*one, *changes]) == 0
        alone.append([float(row[name]) for row in read(tmp_path / "o.tsv")])
    assert np.allclose(np.mean(alone, axis=0), [float(row[name]) for row in together], atol=1e-5)
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
        ("eval.patience=3", "each model would be stopped where it is best on the groups that it is then scored on"),
        ("callbacks=[early_stopping]", "Set train.steps instead, chosen without them"),
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
        errors, level = np.abs(rng.normal(size=400)), np.full(400, reach_level(100))
        pooled = {"group": groups, "error": errors, "half_width": width, "level": level, "drawn": 0.0}
        held.append(list(measure_coverage(pooled).values()))
    assert np.mean(held, axis=0) == pytest.approx([0.95, 0.0], abs=0.02)


# what is made of predictions, without training any model ------------------------------------------------------------


def made_up(cache: Path, fold: int, deviation: float | None = 0.1, **settings: Any) -> Predictions:
    """Predictions of a fold's held-out samples: numbers that are a tenth too high."""
    library = open_library(data(cache, held_out=0.5, fold=fold, **settings))
    assert library.target is not None
    numbers = library.held_out().rows
    mean = library.target.values[numbers] + 0.1
    spread = None if deviation is None else np.full(len(mean), deviation)
    target = PredictedTarget(library.target.name, None, mean, mean - 0.2, mean + 0.2, "", spread)
    return Predictions(library, numbers, np.zeros((len(mean), 1)), None, target, {})


def test_a_level_that_so_few_groups_cannot_reach_is_not_printed(tmp_path: Path) -> None:
    assert [reach_level(groups) for groups in (3, 6, 18, 19, 30)] == pytest.approx([0.75, 6 / 7, 18 / 19, 0.95, 0.95])
    pooled = pool([made_up(tmp_path, fold) for fold in range(2)])
    assert measure_coverage(pooled) == pytest.approx(
        {
            "coverage of 75% intervals with the model's error": 1.0,
            "coverage of 95% intervals of rarefaction alone": 1.0,
        }
    )


def test_quantiles_are_not_called_intervals_of_rarefaction(tmp_path: Path) -> None:
    coverage = measure_coverage(pool([made_up(tmp_path, fold, deviation=None) for fold in range(2)]))
    assert list(coverage) == ["coverage of 75% intervals with the model's error"]


def test_the_constant_of_each_sample_is_that_of_its_fold_and_has_not_seen_it(tmp_path: Path) -> None:
    made = [made_up(tmp_path, fold) for fold in range(2)]
    values = made[0].library.target.values  # type: ignore[union-attr]
    errors = [np.abs(values[one.numbers] - np.delete(values, one.numbers).mean()) for one in made]
    told = score_pooled(None, pool(made))
    assert told["target/mae of the mean"] == pytest.approx(np.concatenate(errors).mean())
    assert told["target/mae"] == pytest.approx(0.1)


def test_the_spread_over_folds_is_that_of_a_sample_of_folds(tmp_path: Path) -> None:
    made = [made_up(tmp_path, fold) for fold in range(2)]
    told = tabulate(made, [{"x": 1.0}, {"x": 2.0}])
    assert told["fold"] == ["0", "1", "mean", "sd"]
    assert told["x"] == ["1.0000", "2.0000", "1.5000", f"{0.5**0.5:.4f}"]


def test_the_spread_of_an_ensemble_is_not_cut_where_chances_end(tmp_path: Path) -> None:
    one = made_up(tmp_path, 0)
    mean = np.array([[0.9, 0.1]])
    low, high = np.clip(mean - 0.392, 0, 1), np.clip(mean + 0.392, 0, 1)
    target = PredictedTarget("kind", ["a", "b"], mean, low, high, "", np.full((1, 2), 0.2))
    both = combine([replace(one, target=target)] * 2, None).target
    assert both is not None
    assert both.deviation == pytest.approx(np.full((1, 2), 0.2))
    assert both.low == pytest.approx(low) and both.high == pytest.approx(high)


@pytest.mark.parametrize("memory", [1000, 10**12])
def test_forests_that_do_not_fit_into_memory_are_left_out(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would end the command after its first fold, or the machine."""
    made = iter([made_up(tmp_path, fold) for fold in range(2)])
    assets = {"training": open_library(data(tmp_path, held_out=0.5)).training().fingerprint}
    others = {"training": open_library(data(tmp_path, held_out=0.5, fold=1)).training().fingerprint}
    models = iter([SimpleNamespace(task=SimpleNamespace(assets=each)) for each in (assets, others)])
    monkeypatch.setattr(unisono, "train", lambda *_: RunResult(tmp_path, 3))
    monkeypatch.setattr(crossvalidation, "open_run", lambda _: None)
    monkeypatch.setattr(crossvalidation, "Predictor", lambda *_, **__: next(models))
    monkeypatch.setattr(crossvalidation, "predict_samples", lambda *_: next(made))
    monkeypatch.setattr(scoring, "predict_with_forest", lambda _, seen, numbers, seed: np.zeros(len(numbers)))
    monkeypatch.setattr(scoring.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
    told = list(crossvalidation.crossvalidate(words(tmp_path), tmp_path / "cv"))
    few = memory == 1000
    assert sum(line.startswith("no forests: they need about 0.0 GB") for line in told) == 2 * few
    (first, *_) = read(tmp_path / "cv" / "folds.tsv")
    assert "target/mae" in first and ("forest/mae" in first) == (not few)
    assert few or read(tmp_path / "cv" / "folds.tsv")[-1]["number of reads/mae"]


@pytest.mark.parametrize("name", ["group", "fold", "ID"])  # the last is a name that QIIME 2 keeps for itself
def test_a_target_replaces_no_other_column(name: str, tmp_path: Path) -> None:
    made = [made_up(tmp_path, fold) for fold in range(2)]
    library, pooled = made[0].library, pool(made)
    assert library.target is not None
    library = replace(library, target=replace(library.target, name=name))
    rows = read(write_predictions(tmp_path / "p.tsv", library, pooled))
    assert {row["held-out group"] for row in rows} == set(library.groups)
    assert {row["fold"] for row in rows} == {"fold-0", "fold-1"}
    assert float(rows[0][f"predicted {name}"]) == pytest.approx(float(rows[0][f"true {name}"]) + 0.1)
    assert f"predicted {name}_low" in rows[0]


def test_a_target_that_is_called_as_a_diversity_has_a_column_of_its_own(tmp_path: Path) -> None:
    one = made_up(tmp_path, 0)
    assert one.target is not None
    shannon = np.arange(len(one.numbers), dtype=float)
    named = replace(one, target=replace(one.target, column="shannon"), diversities={"shannon": (shannon, 0 * shannon)})
    rows = read(write(named, tmp_path / "p.tsv")[0])
    assert [float(row["predicted shannon"]) for row in rows] == shannon.tolist()
    assert [float(row["predicted target shannon"]) for row in rows] == pytest.approx(one.target.mean.tolist(), rel=1e-5)
