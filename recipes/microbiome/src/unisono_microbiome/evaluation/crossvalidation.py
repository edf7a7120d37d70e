"""The verb `crossvalidate`: a model per fold, so that each group is predicted by a model that has never seen it.

All folds stand in one table, beside the forests. The errors of those predictions say how wrong the model is about
unseen groups, which the spread over rarefactions does not: from them come the intervals of `predict ensemble=true`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

import unisono
from unisono import ConfigError, Run, RunError, RunResult, open_run, read_asset, write_table
from unisono.recipe_tools import format_examples, write_whole
from unisono_microbiome.evaluation import scoring
from unisono_microbiome.evaluation.predict import (
    PredictedTarget,
    Predictions,
    Predictor,
    Rows,
    name_predicted,
    predict_samples,
    scores,
)  # fmt: skip
from unisono_microbiome.study.artifacts import write_metadata
from unisono_microbiome.study.library import Library

FILE = "crossvalidation.json"
LEVEL = 0.95  # of the intervals, where there are enough groups for it
Array = NDArray[np.float64]
_OWN = ("data.fold", "data.held_out_groups", "run.name", "run.dir")  # settings that each fold has of its own


class CrossValidation(TypedDict):
    """What `predict ensemble=true` reads: the folds' runs, their samples, half width and level of an interval."""

    folds: list[str]
    samples: list[str]
    half_width: float | None
    level: NotRequired[float]  # cross-validations of earlier versions lack it


def crossvalidate(
    overrides: list[str], out: Path = Path("runs/crossvalidation"), draws: int = 5, seed: int = 0, device: str = "auto"
) -> Iterator[str]:
    """Train a model per fold and score each group by the model that has not seen it, beside random forests.

    Folds that are finished are not trained again. Settings are those of `unisono train microbiome`.

    Args:
        overrides: settings of the runs.
        out: folder for the runs fold-0, fold-1, …, and the tables folds.tsv and predictions.tsv.
        draws: number of rarefactions to average.
        seed: of the rarefactions and the forests.
        device: cpu, cuda, …; auto uses an accelerator if there is one.
    """
    _check_overrides(overrides, out)
    made: list[Predictions] = []
    forests: list[dict[str, Array]] = []
    scored: list[dict[str, float]] = []
    folds = 1
    while len(made) < folds:
        own = [f"data.fold={len(made)}", f"run.dir={out}", f"run.name=fold-{len(made)}"]
        _refuse_unfinished(len(made), unisono.train("microbiome", [*overrides, *own]))
        predictor = Predictor(open_run(out / f"fold-{len(made)}"), draws, seed=seed, device=device)
        predicted = predict_samples(predictor, "held_out")
        groups = np.array(predicted.library.groups)
        folds = -(-len(set(groups)) // len(set(groups[predicted.numbers]))) if not made else folds
        made.append(predicted)
        forests.append({})
        if predicted.target is not None:
            trained_on = predictor.task.assets.get("training")
            why = scoring.explain_no_forests(predicted.library, predicted.numbers, trained_on)
            if why is not None:
                yield f"no forests: {why}"
            else:
                forests[-1] = scoring.predict_with_forests(predicted.library, predicted.numbers, seed)
        scored.append(scores(predicted, forests[-1]))
        yield f"fold {len(made)} of {folds}: " + ", ".join(f"{name} {value:.3f}" for name, value in scored[-1].items())
    half_width, coverage = None, {}
    if (target := made[0].target) is not None:
        pooled = pool(made, forests)
        scored.append(score_pooled(target.classes, pooled))
        if target.classes is None:
            coverage = measure_coverage(pooled)
            half_width = find_half_width(pooled["error"], pooled["group"])
        yield str(write_predictions(out / "predictions.tsv", made[0].library, pooled))
    yield str(write_table(out / "folds.tsv", tabulate(made, scored)))
    samples = [made[0].library.samples[number] for one in made for number in one.numbers]
    record = CrossValidation(
        folds=[f"fold-{n}" for n in range(folds)], samples=samples, half_width=half_width,
        level=reach_level(len(set(made[0].library.groups))),
    )  # fmt: skip
    write_whole(out / FILE, json.dumps(record))
    for name, value in coverage.items():
        yield f"{name}: {value:.3f}"


def _check_overrides(overrides: Sequence[str], out: Path) -> None:
    """Refuse, before a fold is trained, settings with which no fold could be scored, or not on unseen groups."""
    for word in overrides:
        name, _, value = word.partition("=")
        if name in _OWN:
            raise ConfigError(f"{name}: each fold has its own; the runs go to out={out}")
        if name == "data.held_out" and value.strip("0.") == "":
            raise ConfigError(
                f"{word} holds out no group, so there is nothing to score; set the share of a fold, e.g. 0.2 for five"
            )
        patience = name == "eval.patience" and value not in ("null", "")
        if patience or (name == "callbacks" and "early_stopping" in value):
            raise ConfigError(
                f"{word}: each model would be stopped where it is best on the groups that it is then scored on. Set "
                "train.steps instead, chosen without them: with a table of other groups, or of the training groups "
                "alone, `unisono train microbiome … eval.patience=…` finds after how many steps to stop"
            )
        if name == "model.from_run" and value not in ("null", ""):
            raise ConfigError(
                f"{word}: that run was trained on groups that some of the folds hold out, so their models would have "
                "seen them. Leave it out, or train each fold by itself, from a run that holds out the same groups: "
                "unisono train microbiome … data.fold=N model.from_run=RUN_OF_FOLD_N"
            )


def _refuse_unfinished(fold: int, ended: RunResult) -> None:
    """Refuse to score a fold that a user stopped; one that a callback stopped is finished."""
    if ended.is_interrupted:
        raise RunError(
            f"fold-{fold} was stopped after step {ended.step} ({ended.stopped}), so there are no scores yet. The same "
            "command trains it to its end, without run.stop_after, and then the other folds"
        )


def pool(made: Sequence[Predictions], forests: Sequence[Mapping[str, Array]] = ()) -> dict[str, Any]:
    """The predictions of all folds of a target: arrays by name, with a value per sample.

    Args:
        made: of each fold.
        forests: what random forests predict of the same samples, by name, of each fold; without some there are none.

    Returns:
        `sample`, `group` and `fold` of each; `predicted` and `true`, numbers or (n, classes) and classes; `constant`,
        the mean or most frequent class of the samples that its fold was trained on; `forests`, predictions by name;
        and, of numbers, `error` (absolute), `half_width` and `level` of the interval that holds the model's error, from
        the errors in the other folds, and `drawn`, half width of the interval over rarefactions, unless the interval is
        one of quantiles, or one rarefaction was drawn.
    """
    library = made[0].library
    assert library.target is not None
    numbers = np.concatenate([one.numbers for one in made])
    targets = [one.target for one in made if one.target is not None]
    found: dict[str, Any] = {
        "sample": numbers,
        "group": np.array(library.groups)[numbers],
        "fold": np.repeat(np.arange(len(made)), [len(one.numbers) for one in made]),
        "predicted": np.concatenate([one.mean for one in targets]),
        "true": library.target.values[numbers],
        "constant": np.concatenate([np.full(len(one.numbers), scoring.find_constant(one.library)) for one in made]),
    }
    names = list(forests[0]) if forests and all(forests) else []
    found["forests"] = {name: np.concatenate([one[name] for one in forests]) for name in names}
    if library.target.classes is None:
        found["error"] = np.abs(found["predicted"] - found["true"])
        drawn = [1.96 * one.deviation for one in targets if one.deviation is not None]
        if drawn and not np.isnan(drawn[0]).any():  # one draw has no spread
            found["drawn"] = np.concatenate(drawn)
        found |= {name: np.zeros(len(numbers)) for name in ("half_width", "level")}
        for fold in range(len(made)):
            others = found["fold"] != fold
            known = found["group"][others]
            found["half_width"][~others] = find_half_width(found["error"][others], known)
            found["level"][~others] = reach_level(len(set(known)))
    return found


def find_half_width(errors: Array, groups: NDArray[np.str_], level: float = LEVEL) -> float:
    """The error that is not exceeded in a share `level` of the samples, every group weighing the same.

    As a conformal interval has it, a group that is predicted counts as one more, with an error of any size, unless
    there are too few groups for that level: then the largest error.
    """
    names, places, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(errors, kind="stable")
    share = np.cumsum(1 / sizes[places[order]]) / (len(names) + 1)
    place = int(np.searchsorted(share, level - 1e-12))
    return float(errors[order[min(place, len(errors) - 1)]])


def reach_level(groups: int) -> float:
    """The share of unseen groups that an interval from the errors of so many groups holds: `LEVEL`, or less of few."""
    return min(LEVEL, groups / (groups + 1))


def measure_coverage(pooled: Mapping[str, Any]) -> dict[str, float]:
    """How many samples of unseen groups the intervals hold, every group weighing the same."""
    _, places, sizes = np.unique(pooled["group"], return_inverse=True, return_counts=True)
    weight = 1 / sizes[places] / len(sizes)
    level = float((weight * pooled["level"]).sum())
    widths = {f"coverage of {level:.0%} intervals with the model's error": pooled["half_width"]}
    if "drawn" in pooled:
        widths["coverage of 95% intervals of rarefaction alone"] = pooled["drawn"]
    return {name: float((weight * (pooled["error"] <= width)).sum()) for name, width in widths.items()}


def score_pooled(classes: Sequence[str] | None, pooled: Mapping[str, Any]) -> dict[str, float]:
    """Scores of all samples at once, each predicted by the model, forest or constant that has not seen it."""
    score = scoring.score_regression if classes is None else scoring.score_classification
    found: dict[str, float] = {}
    for name, predicted in {"target": pooled["predicted"], **pooled["forests"]}.items():
        found |= score(name, predicted, pooled["true"], pooled["constant"])
    return found


def tabulate(made: Sequence[Predictions], scored: Sequence[Mapping[str, float]]) -> dict[str, list[Any]]:
    """The table of folds: a row for each, their mean and standard deviation, and, of a target, all samples at once."""
    names = list(dict.fromkeys(name for one in scored for name in one))
    values = np.array([[one.get(name, np.nan) for name in names] for one in scored[: len(made)]])
    rows = [*values, values.mean(0), values.std(0, ddof=1)]
    labels = [*(str(fold) for fold in range(len(made))), "mean", "sd"]
    if len(scored) > len(made):
        labels.append("all samples at once")
        rows.append(np.array([scored[-1].get(name, np.nan) for name in names]))
    held = [", ".join(sorted({one.library.groups[number] for number in one.numbers})) for one in made]
    blank = [""] * (len(labels) - len(made))
    return {
        "fold": labels,
        "held out": [*held, *blank],
        "samples": [*(str(len(one.numbers)) for one in made), *blank],
        **{name: [_format(row[place]) for row in rows] for place, name in enumerate(names)},
    }


def _format(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.4f}"


def write_predictions(path: Path, library: Library, pooled: Mapping[str, Any]) -> Path:
    """Write what was predicted of each sample by the model that has not seen it, as metadata of QIIME 2."""
    target = library.target
    assert target is not None
    columns: dict[str, Any] = {
        "sample-id": [library.samples[number] for number in pooled["sample"]],
        "held-out group": pooled["group"].tolist(),
        "fold": [f"fold-{number}" for number in pooled["fold"]],
    }
    name = name_predicted(target.name)
    if target.classes is None:
        made, width = pooled["predicted"], pooled["half_width"]
        columns |= {f"true {target.name}": pooled["true"], name: made}
        columns |= {f"{name}_low": made - width, f"{name}_high": made + width}
    else:
        columns[f"true {target.name}"] = [target.classes[number] for number in pooled["true"]]
        columns[name] = [target.classes[number] for number in pooled["predicted"].argmax(1)]
        columns |= {f"p({label})": pooled["predicted"][:, number] for number, label in enumerate(target.classes)}
    return write_metadata(path, columns)


def predict_ensemble(run: Run, rows: Rows, draws: int, micro_batch: int, seed: int, device: str) -> Predictions:
    """The mean of what the models of all folds predict, with intervals that hold the models' error.

    Raises:
        ConfigError: for a run that is no fold of `crossvalidate`, or samples that some of the models were trained on.
    """
    folder = run.folder.resolve().parent
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"ensemble=true needs a run of a cross-validation, but {folder} has no {FILE}: unisono crossvalidate "
            "microbiome …"
        )
    record: CrossValidation = read_asset(folder, FILE, CrossValidation)
    made: list[Predictions] = []
    for name in record["folds"]:
        member = open_run(folder / name, task=type(run.task)) if name != run.folder.name else run
        member.task.data_config = run.task.data_config
        predictor = Predictor(member, draws, micro_batch, seed, device)
        if not made:
            _refuse_known(predictor.library, predictor.numbers(rows), record, folder)
        made.append(predict_samples(predictor, rows))
    return combine(made, record["half_width"], record.get("level", LEVEL))


def combine(made: Sequence[Predictions], half_width: float | None, level: float = LEVEL) -> Predictions:
    """The mean of several models' predictions of the same samples.

    Of diversities and classes, intervals are those of rarefaction and of the differences between the models.
    """
    one = made[0]
    parts = [other.distances for other in made if other.distances is not None]
    distances = np.mean(parts, axis=0) if parts else None
    diversities = {}
    for name in one.diversities:
        means, deviations = (np.array([other.diversities[name][part] for other in made]) for part in (0, 1))
        diversities[name] = means.mean(0), np.sqrt(means.var(0) + np.square(deviations).mean(0))
    target = None
    if one.target is not None:
        targets = [other.target for other in made if other.target is not None]
        means = np.array([other.mean for other in targets])
        mean = means.mean(0)
        if half_width is not None:
            covers = f"{level:.0%} of unseen groups, by the errors in the folds"
            target = PredictedTarget(one.target.column, None, mean, mean - half_width, mean + half_width, covers)
        else:
            inner = np.array([other.deviation for other in targets])
            deviation = np.sqrt(means.var(0) + np.square(inner).mean(0))
            low, high = np.clip(mean - 1.96 * deviation, 0, 1), np.clip(mean + 1.96 * deviation, 0, 1)
            covers = "95 % of rarefactions and models, by their standard deviation"
            target = PredictedTarget(one.target.column, one.target.classes, mean, low, high, covers, deviation)
    return replace(one, distances=distances, target=target, diversities=diversities)


def _refuse_known(library: Library, numbers: NDArray[np.int64], record: CrossValidation, folder: Path) -> None:
    known = set(record["samples"])
    seen = [library.samples[number] for number in numbers if library.samples[number] in known]
    if seen:
        raise ConfigError(
            f"ensemble=true: {len(seen)} of {len(numbers)} samples ({format_examples(seen)}) were trained on by some "
            f"of the models; what the others say of them is in {folder / 'predictions.tsv'}. Give new samples with "
            "data.table and rows=all"
        )
