"""Why predicted distances spread less than true ones: the noise of the truth, what the loss asks for, and the model.

    python -m benchmarks.microbiome_spread DIR [--folds 0 1 2 3] [--encoder taxon] [--steps 300]

`DIR` is as for `benchmarks/microbiome.py`. Per fold, over all pairs of held-out samples (unweighted UniFrac of one draw
of 1000 reads), one line for each predictor: its correlation r with the truth, the standard deviation of its predictions
over that of the truth, the slope of the truth on the prediction, and R².

A predictor with the least squared error that r allows has a slope of 1, and then *must* have a standard deviation of r
times the true one: that much compression is what the loss asks for. A slope above 1 is compression beyond that, which
a calibration would undo; its line is fitted to pairs of subjects that the model has not seen (three folds within the
training subjects), and also, for comparison, to pairs of the training subjects themselves.

The noise of the truth is measured by a second draw of 1000 reads: the correlation of both draws is the share of the
variance that no predictor of other reads can explain. Two forests of 100 trees on pairs bound what these subjects
allow: one is given how much the samples differ in each taxon, the other the Jaccard and Bray-Curtis distances of the
same reads as well, which are nearly the answer.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor

import unisono
from benchmarks.microbiome import small, study, train
from unisono import generator
from unisono_microbiome.evaluation.predict import Predictor, predict_samples
from unisono_microbiome.rarefy import rarefy
from unisono_microbiome.settings import MicrobiomeConfig
from unisono_microbiome.study import diversity
from unisono_microbiome.study.library import Library
from unisono_microbiome.study.table import CountTable
from unisono_microbiome.task import Microbiome

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
_INNER = 3  # parts of the training subjects that a calibration leaves out in turn
_PAIRS = 8000  # that a forest is trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--folds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--encoder", default="taxon")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    print("| fold | predictor | r | sd, predicted / true | slope | R² |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for fold in arguments.folds:
            _report_fold(arguments, fold, Path(folder))


def _report_fold(arguments: argparse.Namespace, fold: int, folder: Path) -> None:
    """Print the lines of a fold."""

    def predict(name: str, rows: str, steps: int = arguments.steps, **data: Any) -> tuple[Library, Numbers, Array]:
        """Library, sample numbers and predicted distances of a model that is trained once for each name."""
        run = folder / f"{name}-{fold}"
        if not run.is_dir():
            config = study(arguments.data, 0 if "held_out_groups" in data else fold, **data)
            train(
                Microbiome(MicrobiomeConfig(), model=small(arguments.encoder), data=config), steps, 0, folder, run.name
            )
        found = predict_samples(Predictor(unisono.open_run(run)), rows)  # type: ignore[arg-type]
        assert found.distances is not None
        return found.library, found.numbers, found.distances

    library, held, predicted = predict("model", "held_out")
    truth, training = library.distances(), library.training().rows
    true = _pairs(truth, held)
    _print_line(fold, "a second draw of reads", _pairs(_draw_again(library), held), true)
    _print_line(fold, "model", _upper(predicted), true)
    _, _, seen = predict("model", "training")
    own = np.polyfit(_upper(seen), _pairs(truth, training), 1)
    _print_line(fold, "model, calibrated on training pairs", np.polyval(own, _upper(predicted)), true)
    subjects = np.array(library.groups)
    outer, inner = sorted(set(subjects[held])), sorted(set(subjects[training]))
    made: list[Array] = []
    known: list[Array] = []
    for part in range(_INNER):
        _, numbers, apart = predict(f"inner-{part}", "held_out", held_out_groups=[*outer, *inner[part::_INNER]])
        unseen = np.flatnonzero(np.isin(subjects[numbers], inner[part::_INNER]))
        made.append(_pairs(apart, unseen))
        known.append(_pairs(truth, numbers[unseen]))
    line = np.polyfit(np.concatenate(made), np.concatenate(known), 1)
    _print_line(fold, "model, calibrated on unseen training subjects", np.polyval(line, _upper(predicted)), true)
    _print_line(fold, "model, 50 taxa a sample", _upper(predict("few", "held_out", max_taxa=50)[2]), true)
    longer = predict("longer", "held_out", 3 * arguments.steps)[2]
    _print_line(fold, f"model, {3 * arguments.steps} steps", _upper(longer), true)
    for name, simple in (("forest on pairs", False), ("forest on pairs, with simple distances", True)):
        _print_line(fold, name, _predict_with_forest(library, training, held, simple), true)


def _print_line(fold: int, name: str, made: Array, true: Array) -> None:
    r = np.corrcoef(made, true)[0, 1]
    ratio = made.std() / true.std()
    r2 = 1 - np.square(made - true).mean() / true.var()
    print(f"| {fold} | {name} | {r:.2f} | {ratio:.2f} | {r / ratio:.2f} | {r2:.2f} |", flush=True)


def _draw_again(library: Library) -> Array:
    """The same distances of another draw of reads."""
    from scipy.sparse import csr_array

    depth = library.config.rarefy
    assert depth is not None
    counts = library.counts.copy()
    for number, name in enumerate(library.samples):
        part = slice(counts.indptr[number], counts.indptr[number + 1])
        counts.data[part] = rarefy(counts.data[part], depth, generator("a second draw", name))
    counts.eliminate_zeros()
    table = CountTable(library.samples, library.taxa, csr_array(counts))
    metric = library.config.metric
    assert metric != "faith_pd"
    return diversity.pairwise_distances(metric, table, library.tree, library.config.cache)


def _predict_with_forest(library: Library, training: Numbers, held: Numbers, simple: bool) -> Array:
    """Distances of all pairs of held-out samples, of a forest that is trained on pairs of training samples."""
    counts = library.rarefied_table.counts.toarray()
    logs = np.log1p(counts).astype(np.float32)
    more = [library.distances("jaccard"), library.distances("bray_curtis")] if simple else []

    def features(rows: Numbers, first: Numbers, second: Numbers) -> NDArray[np.float32]:
        a, b = rows[first], rows[second]
        apart = np.abs(logs[a] - logs[b])
        return np.column_stack([apart, apart.sum(1), *(one[a, b].astype(np.float32) for one in more)])

    first, second = np.triu_indices(len(training), 1)
    chosen = generator("pairs of the forest").choice(len(first), min(_PAIRS, len(first)), replace=False)
    forest = RandomForestRegressor(100, random_state=0, max_features=0.1, min_samples_leaf=3)
    truth = library.distances()[training[first[chosen]], training[second[chosen]]]
    forest.fit(features(training, first[chosen], second[chosen]), truth)
    return np.asarray(forest.predict(features(held, *np.triu_indices(len(held), 1))), dtype=np.float64)


def _upper(square: Array) -> Array:
    return square[np.triu_indices(len(square), 1)]


def _pairs(square: Array, rows: Numbers) -> Array:
    """Of all pairs of some rows."""
    return _upper(square[np.ix_(rows, rows)])


if __name__ == "__main__":
    main()
