"""What a model gets wrong, and for whom: residuals by group, depth, taxa and covariate, as one table and one plot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono_microbiome.evaluation.predict import Predictions
from unisono_microbiome.study.metadata import parse_number

Array = NDArray[np.float64]
_PARTS = 4  # of numbers
_MAX_SHOWN = 30  # categories in a panel


def find_residuals(predicted: Predictions, truth: Array | None) -> tuple[str, Array] | None:
    """What is looked at, in words, and its residual for each sample, (n,); None where the truth is not known.

    Of a target of numbers it is predicted minus true, of classes the probability that the true class lacks, and without
    a target the mean over a sample's pairs of predicted minus true distance.

    Args:
        predicted: samples.
        truth: their true distances, (n, n), or None.
    """
    target, known = predicted.target, predicted.library.target
    if target is not None and known is not None:
        true = known.values[predicted.numbers]
        if target.classes is None:
            return f"predicted - true {target.column}", target.mean - true
        return f"1 - p(true {target.column})", 1 - target.mean[np.arange(len(true)), true]
    if predicted.distances is None or truth is None or len(truth) < 2:
        return None
    return "predicted - true distance, mean", (predicted.distances - truth).sum(1) / (len(truth) - 1)


def tabulate_residuals(predicted: Predictions, residuals: Array) -> list[dict[str, Any]]:
    """Rows with `by`, `value`, `samples`, `mean` and `mean absolute`: one per category, or per quarter of numbers."""
    rows = []
    for by, values in _properties(predicted).items():
        for label, chosen in _split(values):
            part = residuals[chosen]
            row = {"by": by, "value": label, "samples": len(part), "mean": float(part.mean())}
            rows.append(row | {"mean absolute": float(np.abs(part).mean())})
    return rows


def plot_residuals(predicted: Predictions, residuals: Array, label: str) -> Any:
    """A panel for each property: numbers against residuals, categories side by side."""
    from matplotlib.figure import Figure

    properties = _properties(predicted)
    figure = Figure(figsize=(4.5 * len(properties), 4), layout="constrained")
    for axes, (by, values) in zip(np.atleast_1d(figure.subplots(1, len(properties))), properties.items(), strict=True):
        axes.axhline(0, color="black", linewidth=0.8)
        if isinstance(values, np.ndarray):
            axes.scatter(values, residuals, s=12)
            if values.min() > 0 and values.max() > 20 * values.min():
                axes.set_xscale("log")
        else:
            parts = _split(values)[:_MAX_SHOWN]
            axes.boxplot([residuals[chosen] for _, chosen in parts], widths=0.6)
            axes.set_xticks(range(1, 1 + len(parts)), [name for name, _ in parts], rotation=90, fontsize="small")
        axes.set(xlabel=by, ylabel=label)
    return figure


def _properties(predicted: Predictions) -> dict[str, Array | list[str]]:
    """Properties of the samples, (n,): numbers as an array, categories as a list."""
    library, numbers = predicted.library, predicted.numbers
    found: dict[str, Array | list[str]] = {}
    if library.config.group is not None:
        found[f"group ({library.config.group})"] = [library.groups[number] for number in numbers]
    found["reads"] = np.asarray(library.counts.sum(axis=1), dtype=np.float64).ravel()[numbers]
    found["taxa"] = np.diff(library.counts.indptr).astype(np.float64)[numbers]
    extra = [library.config.target_by] if library.config.target_by is not None else []
    for name in dict.fromkeys([*library.config.covariates, *extra]):
        values = [library.metadata[name][number] for number in numbers]
        parsed = [parse_number(value) for value in values]
        is_text = library.types.get(name) == "categorical" or None in parsed
        found[name] = values if is_text else np.array(parsed, dtype=np.float64)
    return found


def _split(values: Array | list[str]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Labels, and which samples have each: every category, or numbers in quarters of about equal size."""
    if not isinstance(values, np.ndarray):
        texts = np.array(values)
        return [(str(name), texts == name) for name in np.unique(texts)]
    edges = np.unique(np.quantile(values, np.linspace(0, 1, _PARTS + 1)))
    places = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, max(0, len(edges) - 2))
    parts = [places == place for place in np.unique(places)]
    return [(f"{values[chosen].min():g} to {values[chosen].max():g}", chosen) for chosen in parts]
