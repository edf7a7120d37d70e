"""What a trained run says of samples: several rarefactions of each, averaged, as a table with intervals."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from unisono.config.schema.base import Settings
from unisono.config.schema.run import RunConfig
from unisono.launch.load import load_model
from unisono.recipes.microbiome import building
from unisono.recipes.microbiome.library import Library, Rows
from unisono.recipes.microbiome.modelling import MicrobiomeConfig, Model
from unisono.recipes.microbiome.settings import MicrobiomeData, Samples
from unisono.recipes.microbiome.shape import Shape, assets
from unisono.recipes.microbiome.task import Microbiome, Seen, together
from unisono.recipes.microbiome.told import examples
from unisono.recipes.microbiome.transform import Transform
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.rng import generator

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]


class Prediction(Settings):
    """What is predicted of whom; all other words of the command are settings of data."""

    out: Path | None = Field(None, description="tab-separated table to write; null: RUN/predictions.tsv")
    rows: Literal["held_out", "training", "all"] = Field("held_out", description="which samples of the data")
    draws: PositiveInt = Field(5, description="rarefactions that are averaged; 1 where nothing is drawn")
    micro_batch: PositiveInt = Field(8, description="samples that are computed at the same time")
    seed: int = Field(0, description="of the draws")
    baseline: bool = Field(False, description="random forests of what the model sees, and of the number of reads alone")


@dataclass(frozen=True)
class Target:
    """What is predicted of a column of the metadata.

    Attributes:
        column: it.
        classes: of it; None for numbers.
        mean: over the draws, (n,) numbers, or (n, classes) probabilities.
        low: lower end of the interval, of the same shape.
        high: upper end.
        covers: what the interval covers, in words.
    """

    column: str
    classes: list[str] | None
    mean: Array
    low: Array
    high: Array
    covers: str


@dataclass(frozen=True)
class Predicted:
    """What a run says of samples.

    Attributes:
        library: of the samples.
        numbers: which of them, (n,).
        embedding: mean over the draws, (n, features).
        distances: between them, (n, n), mean over the draws; None without.
        target: None without.
        faith_pd: mean over the draws and standard deviation over them, both (n,); None without.
    """

    library: Library
    numbers: NDArray[np.int64]
    embedding: Array
    distances: Array | None
    target: Target | None
    faith_pd: tuple[Array, Array] | None


class Loaded:
    """A run's model beside data it is to look at.

    Args:
        folder: of the run.
        changes: settings of data that replace the run's, by dotted key without `data.`.

    Raises:
        UnisonoError: where there is no such run, or the data do not fit it.
    """

    def __init__(self, folder: Path, changes: Mapping[str, Any] | None = None) -> None:
        self.folder, self.assets = folder, assets(folder)
        self.shape = Shape.of_run(folder)
        made: dict[str, Any] = {}

        def build(run: RunConfig) -> Any:
            assert isinstance(run.task, MicrobiomeConfig) and isinstance(run.model, Model)
            task, model = run.task, run.model.model_copy(update={"from_run": None, "freeze": False})
            data = _changed(run.data.model_dump(), changes or {}, self.assets)
            made["task"] = Microbiome(task, model=model, data=data)
            made["task"].shape = self.shape
            return building.of_run(run, self.shape, made["task"]._tokens)

        self.model: Any = load_model(folder, build=build)
        self.task: Microbiome = made["task"]
        self.library = self.task.library
        self._known = None if self.task.model_config.encoder != "taxon" else self._numbers()

    def batch(self, numbers: Sequence[int], draw: int, seed: int) -> dict[str, torch.Tensor]:
        """Samples, each rarefied by its own key, as a batch on the model's device."""
        import torch

        rows = Rows(self.library, np.arange(len(self.library.samples)))
        seen = [self.task.seen(rows[number], generator(seed, "predict", draw, number)) for number in numbers]
        if self._known is not None:
            seen = [self._of_training(*one) for one in seen]
        like = next(self.model.parameters())
        made = {name: torch.as_tensor(value, device=like.device) for name, value in together(seen).items()}
        return made | {"counts": made["counts"].to(like.dtype)}

    def of_library(self, taxa: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the library of taxa as the model numbers them."""
        if self._known is None:
            return taxa
        places = np.full(self.shape.taxa, -1, dtype=np.int64)
        places[self._known[self._known >= 0]] = np.flatnonzero(self._known >= 0)
        return places[taxa]

    def _numbers(self) -> NDArray[np.int64]:
        """The number that each taxon had in the training, -1 for others."""
        numbers = {name: number for number, name in enumerate(self.assets["taxa"])}
        found = np.array([numbers.get(name, -1) for name in self.library.taxa], dtype=np.int64)
        if (found < 0).all():
            raise DataError(
                f"{self.folder} has learnt a vector for each taxon, and knows none of these {len(found)} "
                f"({examples(self.library.taxa)}); ids have to be those of its own table"
            )
        return found

    def _of_training(self, taxa: NDArray[np.int64], reads: NDArray[np.int64]) -> Seen:
        assert self._known is not None
        taxa = self._known[taxa]
        return taxa[taxa >= 0], reads[taxa >= 0]


def words(given: Sequence[str]) -> tuple[Prediction, dict[str, Any]]:
    """The words of a command: what is predicted, and settings of data.

    Raises:
        ConfigError: for a word that is neither.
    """
    own: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for word in given:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}' is not an override: write key=value, e.g. data.table=FILE or out=FILE")
        value = yaml.safe_load(text)
        if key == "data":
            data["kind"] = value
        elif key.startswith("data."):
            data[key.removeprefix("data.")] = value
        else:
            own[key] = value
    try:
        return Prediction.model_validate(own), data
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        keys = ", ".join(Prediction.model_fields)
        raise ConfigError(f"{told}; there are {keys}, and the settings of data (data.table=FILE, …)") from error


def predict(folder: Path, prediction: Prediction | None = None, changes: Mapping[str, Any] | None = None) -> Predicted:
    """What a run's newest checkpoint says of samples.

    Args:
        folder: of the run.
        prediction: of whom, and how.
        changes: settings of data that replace the run's.

    Raises:
        UnisonoError: where there is no such run, or the data do not fit it.
    """
    prediction = prediction or Prediction()
    return of_loaded(Loaded(folder, changes), prediction)


def of_loaded(run: Loaded, prediction: Prediction) -> Predicted:
    """What a loaded run says; see `predict`."""
    import torch

    from unisono.recipes.microbiome import losses

    library = run.library
    numbers = np.arange(len(library.samples))
    if prediction.rows != "all":
        numbers = (library.held_out if prediction.rows == "held_out" else library.training)().numbers
    if not len(numbers):
        raise DataError(f"no sample is left for rows={prediction.rows}; set rows=all, or another data.held_out")
    drawn = run.task.data_config.rarefy is not None or run.task.data_config.keep == "random"
    made: dict[str, list[Array]] = {}
    for draw in range(prediction.draws if drawn else 1):
        parts: dict[str, list[torch.Tensor]] = {}
        for first in range(0, len(numbers), prediction.micro_batch):
            batch = run.batch(numbers[first : first + prediction.micro_batch].tolist(), draw, prediction.seed)
            with torch.no_grad():
                outputs = run.model(batch)
            for name in ("embedding", "target", "faith_pd"):
                if name in outputs:
                    parts.setdefault(name, []).append(outputs[name].double())
        whole = {name: torch.cat(part) for name, part in parts.items()}
        if "embedding" not in whole:
            raise ConfigError(f"{run.folder} was trained without vectors of samples, so it can predict nothing of them")
        if "distance" in run.task.wanted:
            whole["distance"] = losses.distances(whole["embedding"], whole["embedding"]).fill_diagonal_(0)
        if "target" in whole and run.assets["target"]["classes"] is not None:
            whole["target"] = whole["target"].softmax(1)
        for name, value in whole.items():
            made.setdefault(name, []).append(value.cpu().numpy())
    stacked = {name: np.stack(values) for name, values in made.items()}
    faith = None
    if "faith_pd" in stacked:
        values = Transform(**run.assets["faith_pd"]).back(stacked["faith_pd"][..., 0])
        faith = (values.mean(0), values.std(0))
    return Predicted(
        library,
        numbers,
        stacked["embedding"].mean(0),
        stacked["distance"].mean(0) if "distance" in stacked else None,
        _target(run, stacked["target"]) if "target" in stacked else None,
        faith,
    )


def write(predicted: Predicted, path: Path) -> list[Path]:
    """The table, one line per sample, and beside it the distances where there are any; returns what was written."""
    names = [predicted.library.samples[number] for number in predicted.numbers]
    columns: dict[str, Sequence[Any]] = {"sample": names}
    if (target := predicted.target) is not None:
        name = target.column
        if target.classes is None:
            columns |= {name: list(target.mean), f"{name}_low": list(target.low), f"{name}_high": list(target.high)}
        else:
            columns[name] = [target.classes[number] for number in target.mean.argmax(1)]
            for number, label in enumerate(target.classes):
                for end, values in (("", target.mean), ("_low", target.low), ("_high", target.high)):
                    columns[f"p({label}){end}"] = list(values[:, number])
    if predicted.faith_pd is not None:
        mean, sd = predicted.faith_pd
        for end, values in (("", mean), ("_low", mean - 1.96 * sd), ("_high", mean + 1.96 * sd)):
            columns[f"faith_pd{end}"] = list(values)
    _table(path, list(columns), zip(*columns.values(), strict=True))
    if predicted.distances is None:
        return [path]
    beside = path.with_suffix(".distances.tsv")
    _table(beside, ["", *names], ([name, *row] for name, row in zip(names, predicted.distances, strict=True)))
    return [path, beside]


def scores(predicted: Predicted, baseline: bool = False, seed: int = 0) -> dict[str, float]:
    """How well it fits what is known of the samples, beside predicting the mean of the training samples.

    Args:
        predicted: it.
        baseline: whether random forests are trained and scored, too: of what the model sees of a sample, and of the
            number of its reads alone.
        seed: of the forests.
    """
    from unisono.recipes.microbiome import scoring

    library, numbers = predicted.library, predicted.numbers
    training = library.training().numbers
    told: dict[str, float] = {}
    if predicted.distances is not None and len(numbers) > 1 and (truth := true_distances(library)) is not None:
        upper = np.triu_indices(len(numbers), 1)
        mean = float(truth[np.ix_(training, training)][np.triu_indices(len(training), 1)].mean())
        told |= scoring.regression("distance", predicted.distances[upper], truth[np.ix_(numbers, numbers)][upper], mean)
    if predicted.target is not None and library.target is not None:
        made = {"target": predicted.target.mean}
        if baseline:
            made["forest"] = scoring.forest(library, scoring.shares(library), numbers, seed)
            made["number of reads"] = scoring.forest(library, scoring.depths(library), numbers, seed)
        values = library.target.values
        for name, found in made.items():
            if library.target.classes is None:
                told |= scoring.regression(name, found, values[numbers].astype(float), float(values[training].mean()))
            else:
                told |= scoring.classification(name, found, values[numbers], values[training])
    return told


def true_distances(library: Library) -> Array | None:
    """Between all samples, (samples, samples); None where there is nothing to have them from."""
    config = library.config
    if config.metric == "faith_pd" or (
        config.distances is None and config.tree is None and config.metric.endswith("unifrac")
    ):
        return None
    return library.distances()


def _target(run: Loaded, made: Array) -> Target:
    """The target over the draws, (draws, n, outputs)."""
    told = run.assets["target"]
    column, classes = told["column"], told["classes"]
    over = "95 % of rarefactions, by their standard deviation; the error of the model is no part of it"
    if classes is not None:
        mean, sd = made.mean(0), made.std(0)
        return Target(column, classes, mean, np.clip(mean - 1.96 * sd, 0, 1), np.clip(mean + 1.96 * sd, 0, 1), over)
    values = Transform(**told["transform"]).back(made)
    config = run.task.config.target
    if config.loss == "quantile":
        mean, levels = np.sort(values.mean(0), axis=1), config.quantiles
        covers = f"quantiles {levels[0]:g} to {levels[-1]:g}"
        return Target(column, None, mean[:, len(levels) // 2], mean[:, 0], mean[:, -1], covers)
    mean, sd = values.mean(0)[:, 0], values.std(0)[:, 0]
    return Target(column, None, mean, mean - 1.96 * sd, mean + 1.96 * sd, over)


def _changed(of_run: dict[str, Any], changes: Mapping[str, Any], kept: dict[str, Any]) -> Samples:
    """The run's settings of data with changes; of another kind of data, only what all kinds have stays."""
    kind = changes.get("kind", "study" if "table" in changes else of_run["kind"])
    if kind != of_run["kind"]:
        of_run = {name: value for name, value in of_run.items() if name in Samples.model_fields}
    values = {**of_run, **changes, "kind": kind}
    if kept["target"] is not None and kept["target"]["classes"] is not None and "target" not in changes:
        values["classes"] = kept["target"]["classes"]
        values["target_kind"] = "classification"
    try:
        made: Samples = TypeAdapter[Samples](MicrobiomeData).validate_python(values)
    except ValidationError as error:
        told = "; ".join(f"data.{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        raise ConfigError(told) from error
    return made


def _table(path: Path, header: Sequence[str], rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(header)
        for row in rows:
            writer.writerow([f"{value:.6g}" if isinstance(value, float | np.floating) else value for value in row])
