"""What is done with a trained run: predictions, taking over its encoder, a forest beside it, plots and tables."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import biom
import numpy as np
import pytest
import torch

import unisono
from recipes.microbiome.tests.made import TINY, data, task
from unisono.cli import main
from unisono.runtime.errors import ConfigError, DataError
from unisono_microbiome.evaluation import attention, plots, predict_verb, residuals, scoring
from unisono_microbiome.evaluation.predict import Predictions, Predictor, predict_samples, scores, write
from unisono_microbiome.study.library import open_library
from unisono_microbiome.study.metadata import join_metadata, read_metadata
from unisono_microbiome.study.simulate import simulate_study


def trained(folder: Path, name: str, **more: Any) -> Path:
    of_data = data(folder / "cache").model_dump(exclude_unset=True, mode="json")
    settings = {
        **{f"data.{key}": value for key, value in of_data.items() if key != "kind"},
        **{f"model.{key}": value for key, value in TINY.items()},
        "layout.world_size": 1, "layout.threads": 1, "train.steps": 4, "train.global_batch": 6, "eval.every": None,
        "task.weights": {"distance": 1.0, "target": 1.0, "nucleotides": 1.0, "faith_pd": 1.0},
        "checkpoint.every": None, "run.dir": str(folder / "runs"), "run.name": name, "observe.progress": False,
        **more,
    }  # fmt: skip
    result: Path = unisono.train("microbiome", settings).folder
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verbs")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return trained(folder, "run")


def predicted(folder: Path, overrides: tuple[str, ...] = (), rows: Any = "held_out", **how: Any) -> Predictions:
    return predict_samples(Predictor(unisono.open_run(folder, overrides), **how), rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader((line for line in file if not line.startswith("#q2:")), delimiter="\t"))


# evaluation ---------------------------------------------------------------------------------------------------


def test_an_evaluation_tells_what_follows_from_its_moments(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = next(event for event in reversed(events) if "distance/sd_ratio" in event)
    assert {"distance/correlation", "distance/bias", "target/r2", "faith_pd/r2", "nucleotides/accuracy"} <= told.keys()
    assert not [name for name in told if name.endswith(("/product", "/predicted", "²"))]
    assert main.main(["evaluate", str(run)]) == 0
    again = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert float(again["distance/sd_ratio"]) == pytest.approx(told["distance/sd_ratio"], abs=1e-5)


# predictions ------------------------------------------------------------------------------------------------------


def test_predictions_are_a_table_of_held_out_samples(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out" / "p.tsv"
    assert main.main(["predict", str(run), f"out={out}", "draws=3", "baseline=true"]) == 0
    told = capsys.readouterr().out
    assert {
        "distance/sd_ratio:",
        "faith_pd/r2:",
        "target/mae of the mean:",
        "forest/mae:",
        "number of reads/mae:",
    } <= set(told.replace(": ", ":\n").split("\n"))
    library = open_library(data(folder / "cache"))
    held = [library.samples[number] for number in library.held_out().rows]
    rows, name = read(out), "predicted share"
    assert [row["sample-id"] for row in rows] == held
    assert all(float(row[f"{name}_low"]) < float(row[name]) < float(row[f"{name}_high"]) for row in rows)
    beside = read(out.with_suffix(".distances.tsv"))
    table = np.array([[float(row[name]) for name in held] for row in beside])
    assert [row[""] for row in beside] == held
    assert (table == table.T).all()
    assert (np.diag(table) == 0).all()
    assert table[0, 1:].min() > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["rows=all"], "be scored on samples that they were trained on; rows=held_out has others"),
        (["rows=training"], "be scored on samples that they were trained on"),
        (["data.fold=1"], "not be trained on the same samples as the model"),
        (["data.subjects=8"], "not be trained on the same samples as the model"),
    ],
)
def test_forests_that_would_not_be_comparable_are_left_out(
    run: Path, folder: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["predict", str(run), f"out={folder / 'none.tsv'}", "draws=1", *words]) == 0
    told = capsys.readouterr().out
    assert f"no forests: they would {why}" in told
    assert "target/mae:" in told and "forest/" not in told and "number of reads/" not in told


def test_forests_that_do_not_fit_into_memory_are_left_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Predictor(unisono.open_run(run))
    library, trained_on = opened.library, opened.task.assets["training"]
    held = library.held_out().rows
    assert scoring.explain_no_forests(library, held, trained_on) is None
    monkeypatch.setattr(scoring.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    told = scoring.explain_no_forests(library, held, trained_on)
    assert told is not None and told.startswith("they need about 0.0 GB of memory")


def test_everything_that_is_predicted_is_by_one_predictor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, made of the run alone, ignored what was asked for."""
    made: list[tuple[Any, ...]] = []

    class Told:
        def __init__(self, *given: Any) -> None:
            made.append(given)

        def find_unknown(self, numbers: str) -> list[str]:
            return [f"unknown of {numbers}"]

    found = SimpleNamespace(numbers="all", target=None)
    monkeypatch.setattr(predict_verb, "Predictor", Told)
    monkeypatch.setattr(predict_verb, "predict_samples", lambda predictor, rows: found)
    monkeypatch.setattr(predict_verb, "write", lambda predicted, out: [out])
    monkeypatch.setattr(predict_verb, "scores", lambda *_: {})
    run: Any = SimpleNamespace(folder=tmp_path)
    told = list(predict_verb.predict(run, draws=2, micro_batch=3, seed=4, device="cpu"))
    assert made == [(run, 2, 3, 4, "cpu")] and told[1:] == ["unknown of all"]


def test_draws_are_averaged(run: Path) -> None:
    alone = Predictor(unisono.open_run(run), seed=5)
    numbers = alone.library.held_out().rows.tolist()
    with torch.no_grad():
        made = [alone.model(alone.batch(numbers, draw))["target"][:, 0].numpy() for draw in range(3)]
    told = json.loads((run / "assets" / "microbiome.json").read_text())["target"]["transform"]
    values = np.array(made, dtype=np.float64) * told["scale"] + told["shift"]
    assert values.std(0).min() > 0
    found = predicted(run, draws=3, seed=5).target
    assert found is not None
    assert np.allclose(found.mean, values.mean(0), rtol=1e-5)
    assert np.allclose(found.high - found.mean, 1.96 * values.std(0), rtol=1e-3)


def test_predictions_do_not_depend_on_the_micro_batch(run: Path) -> None:
    one, other = (predicted(run, micro_batch=size, draws=2, rows="all") for size in (1, 7))
    assert one.distances is not None and other.distances is not None
    assert np.allclose(one.distances, other.distances, atol=1e-6)
    assert np.allclose(one.embedding, other.embedding, atol=1e-5)


def test_samples_of_another_table_are_predicted(run: Path, folder: Path) -> None:
    study = simulate_study(data(folder / "cache"))
    table = biom.load_table(str(study.table))
    ids = list(table.ids())[:4]
    fewer = folder / "fewer.biom"
    fewer.write_text(table.filter(ids, inplace=False).remove_empty(axis="observation").to_json("test"))
    changes = ("data=study", f"data.table={fewer}", "data.target=null", "data.group=null", "data.held_out=0")
    found = predicted(run, changes, rows="all", draws=1)
    assert [found.library.samples[number] for number in found.numbers] == ids
    whole = predicted(run, rows="all", draws=1)
    assert found.target is not None and whole.target is not None
    assert np.abs(found.target.mean - whole.target.mean[:4]).max() < 4 * whole.target.mean.std()
    assert "distance/mae" not in scores(found)  # nothing to have the true ones from


def test_one_rarefaction_has_no_interval(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It had one of no width, which was said to hold 95 % of rarefactions."""
    out = folder / "one.tsv"
    assert main.main(["predict", str(run), f"out={out}", "draws=1", "baseline=false"]) == 0
    assert "intervals of share: none, as one rarefaction says nothing of others" in capsys.readouterr().out
    for name in ("share", "faith_pd"):
        for row in read(out)[1:]:  # below the types
            assert row[f"predicted {name}"] and not row[f"predicted {name}_low"] + row[f"predicted {name}_high"]
    found = predicted(run, draws=1)
    assert np.isnan(found.diversities["faith_pd"][1]).all()
    whole = predicted(run, ("data.rarefy=null",), draws=1)  # nothing is drawn, so nothing is unknown
    assert whole.target is not None and (whole.target.low == whole.target.mean).all()


def test_diversities_are_scored_by_those_of_the_reads(run: Path) -> None:
    found = predicted(run, draws=1)
    true = found.library.diversity("faith_pd")[found.numbers]
    assert scores(found)["faith_pd/mae"] == pytest.approx(np.abs(found.diversities["faith_pd"][0] - true).mean())


def test_an_unknown_ending_is_refused_before_anything_is_predicted(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(predict_verb, "Predictor")
    assert main.main(["predict", str(run), "out=p.txt"]) != 0
    assert "p.txt: nothing is written with this ending; choose .tsv or .qza, which QIIME" in capsys.readouterr().err


def test_predictions_are_merged_with_the_metadata_that_they_are_of(run: Path, folder: Path) -> None:
    """As QIIME 2 merges files of metadata: a column may be in one of them only."""
    study = simulate_study(data(folder / "cache"))
    assert study.metadata is not None
    (table, *_) = write(predicted(run, rows="all", draws=1), folder / "merged.tsv")
    both = join_metadata([read_metadata(path, "data.metadata") for path in (study.metadata, table)], "data.metadata")
    assert len(both.ids) == 18
    assert {"share", "predicted share", "predicted share_low"} <= both.columns.keys()


def test_samples_whose_target_is_unknown_are_predicted_with_what_else_the_model_is_given(folder: Path) -> None:
    run = trained(
        folder, "given",
        **{"data.target_by": "kind", "data.covariates": ["kind", "subject"], "task.weights": {"target": 1.0}},
    )  # fmt: skip
    study = simulate_study(data(folder / "cache"))
    assert study.metadata is not None
    rows = read(study.metadata)
    names = [name for name in rows[0] if name != "share"]

    def unknown() -> tuple[str, ...]:
        lines = ["\t".join(row[name] for name in names) for row in [dict(zip(names, names, strict=True)), *rows]]
        path = folder / "unknown.tsv"
        path.write_text("\n".join(lines) + "\n")
        return ("data=study", f"data.table={study.table}", f"data.metadata={path}", "data.target=null")

    whole, found = predicted(run, rows="all", draws=1), predicted(run, unknown(), rows="all", draws=1)
    assert whole.target is not None and found.target is not None
    assert found.library.target is None and scores(found) == {}
    assert np.array_equal(found.target.mean, whole.target.mean)  # in the units of each kind, by its covariates
    (one, *_), least = np.unique([row["kind"] for row in rows]), rows[3]
    subject, kind, least["subject"], least["kind"] = least["subject"], least["kind"], "s-new", "Calm"
    predictor = Predictor(unisono.open_run(run, unknown()), draws=1)
    of_kind, of_subject = predictor.find_unknown(np.arange(18))
    assert of_kind.startswith("kind of 1 of 18 samples ('Calm') is a value that no training sample has (data.target_by")
    assert re.match(
        r"subject of [67] of 18 samples \(.*'s-new'\) is a value .* \(covariate, which is 0 for", of_subject
    )
    least["subject"], least["kind"] = subject, kind
    for words in ((), ("data.covariates=[]",)):
        least["kind"] = "NA"
        with pytest.raises(DataError, match=r"1 of 18 samples \('.*'\) have no value of 'kind' \[no_covariate\]"):
            predicted(run, (*unknown(), *words), rows="all", draws=1)
        least["kind"] = str(one)
    with pytest.raises(ConfigError, match=r"a column of the metadata: set data\.metadata"):
        predicted(run, ("data=study", f"data.table={study.table}", "data.target=null", "data.group=null"), rows="all")


def test_learnt_vectors_follow_their_taxa_into_another_table(folder: Path) -> None:
    run = trained(folder, "taxa", **{"model.encoder": "taxon", "task.weights.nucleotides": 0.0, "data.rarefy": None})
    study = simulate_study(data(folder / "cache"))
    table = biom.load_table(str(study.table))
    turned = folder / "turned.biom"
    turned.write_text(table.sort_order(list(table.ids("observation"))[::-1], axis="observation").to_json("test"))
    changes = ("data=study", "data.target=null", "data.group=null")
    mine, other = (predicted(run, words, rows="all") for words in ((), (*changes, f"data.table={turned}")))
    assert mine.library.taxa == other.library.taxa[::-1]
    assert mine.target is not None and other.target is not None
    assert np.allclose(mine.target.mean, other.target.mean, rtol=1e-5)
    names = {one: f"{one}x" if number > 5 else one for number, one in enumerate(table.ids("observation"))}
    partly = folder / "partly.biom"
    partly.write_text(table.update_ids(names, axis="observation", inplace=False).to_json("test"))
    predictor = Predictor(unisono.open_run(run, (*changes, f"data.table={partly}")))
    reads = table.matrix_data.toarray()
    (told, *more) = predictor.find_unknown(np.arange(18))
    with_reads = reads.sum(1) > 0
    assert f"{with_reads[6:].sum()} of {with_reads.sum()} taxa ('{list(names.values())[6]}', " in told
    assert f"with {reads[6:].sum() / reads.sum():.1%} of the reads have no vector in this model" in told
    assert len(more) == bool((reads[:6].sum(0) == 0).any())
    named = folder / "named.biom"
    table.update_ids({one: f"x{number}" for number, one in enumerate(table.ids("observation"))}, axis="observation")
    named.write_text(table.to_json("test"))
    with pytest.raises(DataError, match="none of these 24"):
        predicted(run, (*changes, f"data.table={named}"))


# from another run -------------------------------------------------------------------------------------------------


def test_a_run_begins_with_the_body_of_another(run: Path, folder: Path) -> None:
    made = task(folder / "cache", {"target": 1.0}, model={"from_run": run, "freeze": True}).build()
    theirs = Predictor(unisono.open_run(run)).model.body.state_dict()
    mine = made.body.state_dict()
    assert mine.keys() <= theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    new = task(folder / "cache", {"target": 1.0}).build().body.state_dict()
    assert any(not torch.equal(mine[name], new[name]) for name in mine)
    assert {name.split(".")[0] for name, p in made.named_parameters() if p.requires_grad} == {"target"}


def test_a_frozen_body_stays_and_heads_learn(run: Path, folder: Path) -> None:
    weights = {"distance": 0.0, "target": 1.0, "nucleotides": 0.0, "faith_pd": 0.0}
    tuned = trained(folder, "tuned", **{"model.from_run": str(run), "model.freeze": True, "task.weights": weights})
    before, after = (Predictor(unisono.open_run(one)).model for one in (run, tuned))
    kept = after.body.state_dict()
    assert all(torch.equal(value, before.body.state_dict()[name]) for name, value in kept.items())
    assert not torch.equal(after.target.weight, before.target.weight)


@pytest.mark.parametrize(
    ("model", "weights", "told"),
    [
        ({"features": 16}, {"target": 1.0}, "set model.features=8"),
        ({"counts": "film"}, {"target": 1.0}, "set model.counts=add"),
        ({"freeze": True}, {"counts": 1.0}, "has not learnt share"),
    ],
)
def test_runs_that_do_not_fit_are_refused(
    run: Path, folder: Path, model: dict[str, Any], weights: dict[str, float], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        task(folder / "cache", weights, model={"from_run": run, **model}).build()


# beside it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["share", "kind"])
def test_a_forest_learns_from_training_samples_alone(folder: Path, column: str) -> None:
    library = open_library(data(folder / "cache", target=column))
    held = library.held_out().rows
    seen = scoring.read_shares(library)
    made = scoring.predict_with_forest(library, seen, held, seed=1, trees=20)
    assert made.shape == ((len(held),) if column == "share" else (len(held), 2))
    assert library.target is not None
    before = library.target.values.copy()
    library.target.values[held] = library.target.values[held][::-1]
    assert (scoring.predict_with_forest(library, seen, held, seed=1, trees=20) == made).all()
    training = library.training().rows
    library.target.values[training] = library.target.values[training][::-1]
    assert (scoring.predict_with_forest(library, seen, held, seed=1, trees=20) != made).any()
    library.target.values[:] = before


def test_a_forest_sees_as_many_reads_of_each_sample_as_the_model(folder: Path) -> None:
    """With all reads, a rare taxon is there in deep samples, and in no shallow one."""
    library = open_library(data(folder / "cache", target="share", rarefy=100))
    assert len(set(scoring.read_depths(library)[:, 0])) > 1
    reads = 100 * scoring.read_shares(library)
    assert np.allclose(reads, reads.round()) and np.allclose(reads.sum(1), 100)
    whole = scoring.read_shares(open_library(data(folder / "cache", target="share", rarefy=None)))
    assert np.allclose(whole, library.counts.toarray() / scoring.read_depths(library))
    assert (reads > 0).sum() < (whole > 0).sum()


def test_a_forest_is_given_the_categories_by_which_targets_are_transformed(folder: Path) -> None:
    """Or it would not know of a sample what the model's prediction is scaled by."""
    alone = scoring.read_covariates(open_library(data(folder / "cache", target="share")))
    given = scoring.read_covariates(open_library(data(folder / "cache", target="share", target_by="kind")))
    both = open_library(data(folder / "cache", target="share", target_by="kind", covariates=["kind", "subject"]))
    kinds = sorted(set(both.metadata["kind"]))
    assert alone.shape == (18, 0)
    assert given.tolist() == [[float(kind == one) for one in kinds] for kind in both.metadata["kind"]]
    assert scoring.read_covariates(both).shape[1] == len(kinds) + len(set(np.array(both.groups)[both.training().rows]))


def test_scores_are_their_definitions() -> None:
    true, made = np.array([1.0, 2.0, 4.0]), np.array([1.5, 2.0, 3.0])
    told = scoring.score_regression("x", made, true, 2.0)
    assert told == pytest.approx(
        {
            "x/mae": 0.5,
            "x/mae of the mean": 1.0,
            "x/r2": 1 - 1.25 / ((true - true.mean()) ** 2).sum(),
            "x/correlation": np.corrcoef(made, true)[0, 1],
            "x/sd_ratio": made.std() / true.std(),
        }
    )
    chances = np.array([[0.9, 0.1], [0.4, 0.6], [0.6, 0.4], [0.2, 0.8]])
    told = scoring.score_classification("x", chances, np.array([0, 0, 1, 1]), 1)
    assert told == pytest.approx(
        {"x/accuracy": 0.5, "x/accuracy of the most frequent": 0.5, "x/balanced accuracy": 0.5, "x/auc": 0.75}
    )


# looking ----------------------------------------------------------------------------------------------------------


def test_plots_and_a_table_of_taxa_are_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["look", str(run), "draws=1", "rows=all"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    pictures = ["distances", "ordination", "target", "residuals", "attention", "sequence"]
    assert [path.name for path in written] == ["taxa.tsv", "residuals.tsv", *(f"{name}.png" for name in pictures)]
    assert all(path.stat().st_size > 10_000 for path in written[2:])
    rows = read(written[0])
    assert all(row["taxonomy"] for row in rows)
    effects = [abs(float(row["gradient"]) * float(row["samples"])) for row in rows]
    assert effects == sorted(effects, reverse=True)
    tracked = [path.read_bytes() for path in (run / "tensorboard").glob("events*")]
    for name in (*(f"plots/{picture}" for picture in pictures), "residuals", "important taxa"):
        assert sum(name.encode() in content for content in tracked) == 1
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (shown,) = [event for event in lines if event.get("sample") == "residuals"]
    assert shown["columns"] == ["by", "value", "samples", "mean", "mean absolute"]
    (shown,) = [event for event in lines if event.get("sample") == "important taxa"]
    assert shown["columns"] == ["taxon", "taxonomy", "samples", "attention", "gradient"]


def test_residuals_by_group_and_quarters_add_up_to_those_of_all_samples(run: Path) -> None:
    found = predicted(run, ("data.covariates=[kind]",), rows="all", draws=1)
    made = residuals.find_residuals(found, None)
    assert made is not None and found.target is not None and found.library.target is not None
    label, values = made
    assert label == "predicted - true share"
    assert np.allclose(values, found.target.mean - found.library.target.values)
    rows = residuals.tabulate_residuals(found, values)
    assert list(dict.fromkeys(row["by"] for row in rows)) == ["group (subject)", "reads", "taxa", "kind"]
    for by in ("group (subject)", "reads", "taxa", "kind"):
        parts = [row for row in rows if row["by"] == by]
        assert len(parts) == {"group (subject)": 6, "kind": 2}.get(by, 4)
        assert sum(row["samples"] for row in parts) == 18
        assert sum(row["samples"] * row["mean"] for row in parts) == pytest.approx(values.sum())
    one = next(row for row in rows if row["value"] == "calm")
    calm = np.array(found.library.metadata["kind"]) == "calm"
    assert one["mean absolute"] == pytest.approx(np.abs(values[calm]).mean())


def test_attention_maps_are_what_the_model_computes(run: Path) -> None:
    predictor = Predictor(unisono.open_run(run), draws=1)
    taxa = attention.map_taxa(predictor, 3)
    batch = predictor.batch([3], 0)
    assert len(taxa.labels) == batch["taxa"].shape[1]
    assert taxa.between is not None
    assert taxa.between.sum(1) == pytest.approx(np.ones(len(taxa.labels)), abs=1e-6)
    assert taxa.pooled.sum() == pytest.approx(1, abs=1e-6)
    positions = attention.map_positions(predictor, 5)
    assert positions is not None and positions.between is not None
    assert "".join(positions.labels[1:]) == predictor.library.dna()[5]
    assert positions.between.shape == (17, 17)
    mixer = predictor.model.body.samples[-1].mixer
    x, seen = torch.randn(2, 5, 8), torch.tensor([[True] * 5, [True, True, False, False, True]])
    value = mixer._project(x)[2]
    mixed = (mixer.weights(x, seen) @ value).transpose(1, 2).reshape(2, 5, 8)
    assert torch.allclose(mixer.out(mixed), mixer(x, seen), atol=1e-6)


def test_a_sample_that_is_not_there_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["look", str(run), "draws=1", "sample=S0.9"]) != 0
    assert "sample=S0.9: there is no such sample, did you mean" in capsys.readouterr().err


def test_the_attention_of_a_sample_comes_to_one(run: Path) -> None:
    found = plots.importance(Predictor(unisono.open_run(run), draws=2, micro_batch=2), np.arange(5))
    assert np.nansum(found["attention"] * found["samples"]) == pytest.approx(5, rel=1e-5)
    assert np.isnan(found["attention"][found["samples"] == 0]).all()


def test_the_gradient_is_what_a_taxon_changes(run: Path) -> None:
    loaded = Predictor(unisono.open_run(run), draws=1)
    loaded.model.double()
    found = plots.importance(loaded, np.array([3]))
    batch = loaded.batch([3], 0)
    place = 2
    taxon = int(batch["taxa"][0, place])
    with torch.no_grad():
        vectors = loaded.model.body.vectors(batch["taxa"])
        ends = []
        for factor in (1 - 1e-5, 1 + 1e-5):
            moved = vectors.clone()
            moved[0, place] *= factor
            embedding = loaded.model.body.pool_vectors(moved, batch["counts"], batch["taxa"] >= 0)["embedding"]
            ends.append(float(loaded.model.target(embedding)))
    assert found["gradient"][taxon] == pytest.approx((ends[1] - ends[0]) / 2e-5, rel=1e-6)
    assert abs(found["gradient"][taxon]) > 1e-6
