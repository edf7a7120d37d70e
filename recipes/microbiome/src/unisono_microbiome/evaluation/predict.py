"""A trained run's predictions for samples, averaged over rarefactions, with intervals."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, Run, Scaling, generator
from unisono.recipe_tools import format_examples, format_share
from unisono_microbiome.evaluation import scoring
from unisono_microbiome.samples import collate_taxa
from unisono_microbiome.settings import DIVERSITIES
from unisono_microbiome.study import artifacts
from unisono_microbiome.study.library import Library
from unisono_microbiome.task import Microbiome

if TYPE_CHECKING:
    import torch

Array = NDArray[np.float64]
Rows = Literal["held_out", "training", "all"]
_OVER_DRAWS = "95 % of rarefactions, by their standard deviation; the error of the model is no part of it"
_NO_SPREAD = "none, as one rarefaction says nothing of others; set draws to 2 or more"


@dataclass(frozen=True)
class PredictedTarget:
    """Predictions for a column of the metadata.

    Attributes:
        column: it.
        classes: of it; None for numbers.
        mean: over the draws, (n,) numbers, or (n, classes) probabilities.
        low: lower end of the interval, of the same shape.
        high: upper end.
        covers: what the interval covers, in words.
        deviation: standard deviation over the draws, of which the interval was made, NaN of a single draw; None if it
            was made otherwise.
    """

    column: str
    classes: list[str] | None
    mean: Array
    low: Array
    high: Array
    covers: str
    deviation: Array | None = None


@dataclass(frozen=True)
class Predictions:
    """A run's predictions for samples.

    Attributes:
        library: of the samples.
        numbers: which of them, (n,).
        embedding: mean over the draws, (n, features).
        distances: between them, (n, n), mean over the draws; None without.
        target: None without.
        diversities: by name, mean over the draws and standard deviation over them, both (n,).
    """

    library: Library
    numbers: NDArray[np.int64]
    embedding: Array
    distances: Array | None
    target: PredictedTarget | None
    diversities: dict[str, tuple[Array, Array]]


@dataclass
class Predictor:
    """A run's model with data to predict: its own, or data from changed settings.

    Attributes:
        run: it.
        draws: number of rarefactions to average.
        micro_batch: number of samples per forward pass.
        seed: of the rarefactions.
        device: of the model; auto for an accelerator if there is one.
    """

    run: Run
    draws: int = 5
    micro_batch: int = 8
    seed: int = 0
    device: str = "auto"

    @property
    def task(self) -> Microbiome:
        """Of the run."""
        assert isinstance(self.run.task, Microbiome)
        return self.run.task

    @property
    def library(self) -> Library:
        """Of the samples that can be predicted."""
        return self.task.library

    @cached_property
    def model(self) -> Any:
        """With the newest weights."""
        return self.run.load_model(device=self.device)

    def numbers(self, rows: Rows) -> NDArray[np.int64]:
        """Which samples of the library are meant; none are refused."""
        numbers = np.arange(len(self.library))
        if rows != "all":
            numbers = (self.library.held_out if rows == "held_out" else self.library.training)().rows
        if not len(numbers):
            raise DataError(f"no samples for rows={rows}; set rows=all, or change data.held_out")
        return numbers

    @property
    def draws_differ(self) -> bool:
        """Whether what the model sees of a sample is drawn."""
        return self.task.data_config.rarefy is not None or self.task.data_config.keep == "random"

    def batches(self, numbers: NDArray[np.int64]) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Samples in micro-batches, as often as they are drawn, with the number of the draw."""
        for draw in range(self.draws if self.draws_differ else 1):
            for first in range(0, len(numbers), self.micro_batch):
                yield draw, self.batch(numbers[first : first + self.micro_batch].tolist(), draw)

    def batch(self, numbers: Sequence[int], draw: int) -> dict[str, torch.Tensor]:
        """Samples, each rarefied by its own key, as a batch on the model's device."""
        import torch

        seen = [self.task.draw_taxa(self.library[n], generator(self.seed, "predict", draw, n)) for n in numbers]
        if (known := self._training_numbers) is not None:
            seen = [(known[taxa][known[taxa] >= 0], reads[known[taxa] >= 0]) for taxa, reads in seen]
        like = next(self.model.parameters())
        made = {name: torch.as_tensor(value, device=like.device) for name, value in collate_taxa(seen).items()}
        if self.task.learnt.covariates:
            made["covariates"] = torch.as_tensor(self.task.learnt.encoded_covariates[list(numbers)], device=like.device)
        return made | {"counts": made["counts"].to(like.dtype)}

    def to_library_numbers(self, taxa: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers in the library of taxa as the model numbers them."""
        if self._training_numbers is None:
            return taxa
        places = np.full(self.task.shape.taxa, -1, dtype=np.int64)
        places[self._training_numbers[self._training_numbers >= 0]] = np.flatnonzero(self._training_numbers >= 0)
        return places[taxa]

    def find_unknown(self, numbers: NDArray[np.int64]) -> list[str]:
        """Sentences about what the model does not know of these samples: categories, and taxa without a vector."""
        found = self.task.learnt.find_unseen(numbers)
        counts, known = self.library.counts, self._training_numbers
        reads = counts.T @ np.bincount(numbers, minlength=len(self.library))
        if known is None or not (lost := reads[known < 0].sum()):
            return found
        strange = [self.library.taxa[taxon] for taxon in np.flatnonzero((known < 0) & (reads > 0))]
        what = format_share(strange, int((reads > 0).sum()), "taxa")
        found.append(f"{what} with {lost / reads.sum():.1%} of the reads have no vector in this model and are not seen")
        if nothing := np.flatnonzero((counts @ (known >= 0).astype(np.int64))[numbers] == 0).tolist():
            names = [self.library.samples[numbers[place]] for place in nothing]
            found.append(f"{format_share(names, len(numbers), 'samples')} have no other taxa: nothing of them is seen")
        return found

    @cached_property
    def _training_numbers(self) -> NDArray[np.int64] | None:
        """The number that each taxon had in the training, -1 for others; None where the model reads DNA."""
        if self.task.model_config.encoder != "taxon":
            return None
        numbers = {name: number for number, name in enumerate(self.task.assets["taxa"])}
        found = np.array([numbers.get(name, -1) for name in self.library.taxa], dtype=np.int64)
        if (found < 0).all():
            raise DataError(
                f"{self.run.folder} has learnt a vector for each taxon, but none of these {len(found)} "
                f"({format_examples(self.library.taxa)}); use the ids of its own table"
            )
        return found


def predict_samples(predictor: Predictor, rows: Rows) -> Predictions:
    """A run's predictions for samples."""
    import torch

    from unisono_microbiome import losses

    task, numbers = predictor.task, predictor.numbers(rows)
    parts: dict[str, dict[int, list[torch.Tensor]]] = {}
    for draw, batch in predictor.batches(numbers):
        with torch.no_grad():
            outputs = predictor.model(batch)
        for name in ("embedding", "target", *DIVERSITIES):
            if name in outputs:
                parts.setdefault(name, {}).setdefault(draw, []).append(outputs[name].double())
    if "embedding" not in parts:
        raise ConfigError(
            f"{predictor.run.folder} was trained without sample vectors, so it cannot predict anything about samples"
        )
    drawn = {name: torch.stack([torch.cat(part) for part in draws.values()]) for name, draws in parts.items()}
    distances = target = None
    if "distance" in task.weighted_losses:
        each = [losses.embedding_distances(one, one).fill_diagonal_(0) for one in drawn["embedding"]]
        distances = task.learnt.distance_scale * torch.stack(each).mean(0).cpu().numpy()
    diversities = {}
    for name in DIVERSITIES:
        if name in drawn:
            values = Scaling(**task.assets[name]).inverse(drawn[name][..., 0].cpu().numpy())  # type: ignore[literal-required]
            diversities[name] = values.mean(0), _find_spread(values, predictor)
    if "target" in drawn:
        is_class = task.learnt.target_scaling is None
        made = (drawn["target"].softmax(-1) if is_class else drawn["target"]).cpu().numpy()
        target = _summarise_target(predictor, made, numbers)
    embedding = drawn["embedding"].mean(0).cpu().numpy()
    return Predictions(predictor.library, numbers, embedding, distances, target, diversities)


def write(predicted: Predictions, path: Path) -> list[Path]:
    """Write the table, one line per sample, and the distances if there are any; returns the files written."""
    names = [predicted.library.samples[number] for number in predicted.numbers]
    columns: dict[str, Any] = {"sample-id": names}
    if (target := predicted.target) is not None:
        ends = (("", target.mean), ("_low", target.low), ("_high", target.high))
        name = name_predicted(target.column, taken=predicted.diversities)
        if target.classes is None:
            columns |= {f"{name}{end}": list(values) for end, values in ends}
        else:
            columns[name] = [target.classes[number] for number in target.mean.argmax(1)]
            for number, label in enumerate(target.classes):
                columns |= {f"p({label}){end}": list(values[:, number]) for end, values in ends}
    for diversity, (mean, sd) in predicted.diversities.items():
        name = name_predicted(diversity)
        columns |= {name: mean, f"{name}_low": mean - 1.96 * sd, f"{name}_high": mean + 1.96 * sd}
    written = [artifacts.write_metadata(path, columns)]
    if predicted.distances is not None:
        beside = path.with_suffix(f".distances{path.suffix}")
        written.append(artifacts.write_distances(beside, names, predicted.distances))
    return written


def name_predicted(name: str, taken: Collection[str] = ()) -> str:
    """What a column of predictions is called: not as the true values are, or QIIME 2 would not merge the two files.

    Args:
        name: of what is predicted.
        taken: names of what else is predicted; a target that is called as one of these is marked as the target.
    """
    return f"predicted target {name}" if name in taken else f"predicted {name}"


def scores(predicted: Predictions, forests: Mapping[str, Array] = MappingProxyType({})) -> dict[str, float]:
    """Scores against known values, compared with predicting the mean of the training samples.

    `forests` are what others predict of the same target, by name, which is scored alike.
    """
    library, numbers = predicted.library, predicted.numbers
    training = library.training().rows
    found: dict[str, float] = {}
    if predicted.distances is not None and len(numbers) > 1 and (truth := true_distances(library)) is not None:
        upper = np.triu_indices(len(numbers), 1)
        mean = float(truth[np.ix_(training, training)][np.triu_indices(len(training), 1)].mean())
        true = truth[np.ix_(numbers, numbers)][upper]
        found |= scoring.score_regression("distance", predicted.distances[upper], true, mean)
    for name, (of_model, _) in predicted.diversities.items():
        if name == "shannon" or library.tree is not None:
            true = library.diversity(name)
            found |= scoring.score_regression(name, of_model, true[numbers], float(true[training].mean()))
    if predicted.target is not None and library.target is not None:
        values, constant = library.target.values, scoring.find_constant(library)
        for name, one in {"target": predicted.target.mean, **forests}.items():
            if library.target.classes is None:
                found |= scoring.score_regression(name, one, values[numbers].astype(float), constant)
            else:
                found |= scoring.score_classification(name, one, values[numbers], constant)
    return found


def true_distances(library: Library) -> Array | None:
    """Between all samples, (samples, samples); None where there is nothing to have them from."""
    config = library.config
    without = config.distances is None and config.tree is None and config.metric.endswith("unifrac")
    return None if config.metric == "faith_pd" or without else library.distances()


def _summarise_target(predictor: Predictor, drawn: Array, numbers: NDArray[np.int64]) -> PredictedTarget:
    """The target over the draws, (draws, n, outputs), of these samples."""
    task = predictor.task
    known, config = task.assets["target"], task.config.target
    assert known is not None
    column, classes = known["column"], known["classes"]
    covers = _NO_SPREAD if predictor.draws_differ and len(drawn) == 1 else _OVER_DRAWS
    if classes is not None:
        mean, sd = drawn.mean(0), _find_spread(drawn, predictor)
        low, high = np.clip(mean - 1.96 * sd, 0, 1), np.clip(mean + 1.96 * sd, 0, 1)
        return PredictedTarget(column, classes, mean, low, high, covers, sd)
    values = task.learnt.scale_back(drawn, numbers)
    if config.loss == "quantile":
        mean, levels = np.sort(values.mean(0), axis=1), config.quantiles
        covers = f"quantiles {levels[0]:g} to {levels[-1]:g}"
        return PredictedTarget(column, None, mean[:, len(levels) // 2], mean[:, 0], mean[:, -1], covers)
    mean, sd = values.mean(0)[:, 0], _find_spread(values, predictor)[:, 0]
    return PredictedTarget(column, None, mean, mean - 1.96 * sd, mean + 1.96 * sd, covers, sd)


def _find_spread(values: Array, predictor: Predictor) -> Array:
    """The standard deviation over the draws, (draws, …); NaN if there is one draw of several that would differ."""
    return np.full(values.shape[1:], np.nan) if predictor.draws_differ and len(values) == 1 else values.std(0)
