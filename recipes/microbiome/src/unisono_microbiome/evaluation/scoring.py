"""Scores of predictions, compared with predicting the training samples' mean or most frequent class."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from unisono_microbiome.study.library import Library
from unisono_microbiome.targets import Covariate, encode_covariates, fit_covariates

Array = NDArray[np.float64]
_DENSE_BYTES = 3 * 8  # of a value of the dense table: reads, shares, and what the forests copy


def find_constant(library: Library) -> Any:
    """What a constant prediction of the target is: the mean or the most frequent class of the training samples."""
    assert library.target is not None
    values = library.target.values[library.training().rows]
    return float(values.mean()) if library.target.classes is None else int(np.bincount(values).argmax())


def score_regression(name: str, made: Array, true: Array, mean: Array | float) -> dict[str, float]:
    """Scores of predicted numbers, (n,), each called `name/…`; `mean` is that of training samples, one or (n,)."""
    spread = float(true.std())
    return {
        f"{name}/mae": float(np.abs(made - true).mean()),
        f"{name}/mae of the mean": float(np.abs(mean - true).mean()),
        f"{name}/r2": 1 - float(np.square(made - true).mean()) / spread**2 if spread else 0.0,
        f"{name}/correlation": float(np.corrcoef(made, true)[0, 1]) if spread and made.std() else 0.0,
        f"{name}/sd_ratio": float(made.std()) / spread if spread else 0.0,
    }


def score_classification(
    name: str, made: Array, true: NDArray[Any], often: NDArray[np.int64] | int
) -> dict[str, float]:
    """Scores of probabilities, (n, classes), each called `name/…`, with the area under the curve of two classes.

    `often` is the most frequent class of training samples, one or (n,).
    """
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    scores = {
        f"{name}/accuracy": float((made.argmax(1) == true).mean()),
        f"{name}/accuracy of the most frequent": float((true == often).mean()),
        f"{name}/balanced accuracy": float(balanced_accuracy_score(true, made.argmax(1))),
    }
    if made.shape[1] == 2 and len(np.unique(true)) == 2:
        scores[f"{name}/auc"] = float(roc_auc_score(true, made[:, 1]))
    return scores


def read_shares(library: Library) -> Array:
    """A forest's inputs, (samples, taxa): shares of the reads, of `data.rarefy` reads as for the model.

    The number of reads depends on the sequencing, and affects the shares of all rare taxa.
    """
    counts = library.rarefied_table.counts.toarray()
    return np.asarray(counts / counts.sum(1, keepdims=True), dtype=np.float64)


def read_covariates(library: Library) -> Array:
    """What the model is given of samples besides their reads, (samples, numbers); no columns without any.

    These are the covariates, and the categories by which targets are transformed.
    """
    known, by, training = fit_covariates(library), library.config.target_by, library.training().rows
    if by is not None and by not in library.config.covariates:
        values = library.metadata[by]
        if len({values[number] for number in training}) > 1:
            known.append(Covariate.fit(by, values, training, "categorical"))
    return encode_covariates(known, library.metadata, len(library))


def read_depths(library: Library) -> Array:
    """The number of reads per sample, (samples, 1): predictions from it reflect only the sequencing."""
    return np.asarray(library.counts.sum(1), dtype=np.float64).reshape(-1, 1)


def explain_no_forests(library: Library, numbers: NDArray[np.int64], trained_on: str | None) -> str | None:
    """Why no forest is trained to predict some samples; None if it can be.

    Args:
        library: of the samples.
        numbers: which of them.
        trained_on: fingerprint of the samples that the model was trained on, or None if it is not known.
    """
    training = library.training()
    if training.fingerprint != trained_on:
        return "they would not be trained on the same samples as the model"
    if np.isin(numbers, training.rows).any():
        return "they would be scored on samples that they were trained on; rows=held_out has others"
    needed = _DENSE_BYTES * len(library) * len(library.taxa)
    if needed > (there := psutil.virtual_memory().available):
        return f"they need about {needed / 1e9:.1f} GB of memory, but {there / 1e9:.1f} GB are free"
    return None


def predict_with_forests(library: Library, numbers: NDArray[np.int64], seed: int) -> dict[str, Array]:
    """What random forests predict of samples, as of `predict_with_forest`, by what they see.

    Returns:
        `forest`: of what the model sees of a sample; `number of reads`: of that alone.
    """
    seen = np.hstack([read_shares(library), read_covariates(library)])
    return {
        "forest": predict_with_forest(library, seen, numbers, seed),
        "number of reads": predict_with_forest(library, read_depths(library), numbers, seed),
    }


def predict_with_forest(
    library: Library, seen: Array, numbers: NDArray[np.int64], seed: int, trees: int = 500
) -> Array:
    """Predictions of a random forest trained on the training samples of a library with a target.

    `seen` are its inputs of every sample, (samples, any); it predicts (n,) numbers, or (n, classes) probabilities.
    """
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    training, target = library.training().rows, library.target
    assert target is not None
    if target.classes is None:
        made = RandomForestRegressor(trees, random_state=seed, max_features="sqrt")
        return np.asarray(made.fit(seen[training], target.values[training]).predict(seen[numbers]), dtype=np.float64)
    chosen = RandomForestClassifier(trees, random_state=seed)
    chosen.fit(seen[training], target.values[training])
    result = np.zeros((len(numbers), len(target.classes)))
    result[:, chosen.classes_] = chosen.predict_proba(seen[numbers])
    return result
