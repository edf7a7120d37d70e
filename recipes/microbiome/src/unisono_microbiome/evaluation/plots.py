"""The verb `look`: predicted against true values, ordinations, residuals, attention, and the importance of taxa."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unisono import ConfigError, Run, write_table
from unisono.recipe_tools import atomic_file, nearest
from unisono_microbiome import losses
from unisono_microbiome.evaluation import attention, residuals
from unisono_microbiome.evaluation.predict import Predictions, Predictor, Rows, predict_samples, true_distances
from unisono_microbiome.model import Body, Network

Array = NDArray[np.float64]
_MAX_LEGEND = 20  # groups in a legend
_MAX_TAXA = 30  # in a report, of the whole table


def look(
    run: Run,
    out: Path | None = None,
    rows: Rows = "held_out",
    draws: int = 5,
    micro_batch: int = 8,
    seed: int = 0,
    sample: str | None = None,
    device: str = "auto",
) -> list[Path]:
    """Plot a run's newest checkpoint, and write tables of residuals and important taxa; all goes to its trackers, too.

    Args:
        run: its folder; settings of data may be replaced, e.g. data.table=FILE.
        out: folder for plots and table; by default RUN/plots.
        rows: held_out, training or all samples.
        draws: number of rarefactions to average.
        micro_batch: number of samples per forward pass.
        seed: of the rarefactions.
        sample: id of the sample whose attention is drawn; by default the first.
        device: cpu, cuda, …; auto uses an accelerator if there is one.
    """
    out = out or run.folder / "plots"
    out.mkdir(parents=True, exist_ok=True)
    predictor = Predictor(run, draws, micro_batch, seed, device)
    predicted = predict_samples(predictor, rows)
    truth = None if predicted.distances is None else true_distances(predicted.library)
    drawn: dict[str, Any] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    if truth is not None:
        truth = truth[np.ix_(predicted.numbers, predicted.numbers)]
    if predicted.distances is not None and truth is not None and len(predicted.numbers) > 2:
        drawn["distances"] = _plot_distances(predicted, truth)
        drawn["ordination"] = _plot_ordination(predicted, truth)
    if predicted.target is not None and predicted.library.target is not None:
        drawn["target"] = _plot_target(predicted)
    taxa = _tabulate_taxa(predictor, predicted)
    written = [write_table(out / "taxa.tsv", taxa)]
    tables["important taxa"] = [
        {name: values[place] for name, values in taxa.items()} for place in range(min(_MAX_TAXA, len(taxa["taxon"])))
    ]
    if (found := residuals.find_residuals(predicted, truth)) is not None:
        label, values = found
        drawn["residuals"] = residuals.plot_residuals(predicted, values, label)
        tables["residuals"] = residuals.tabulate_residuals(predicted, values)
        columns = {name: [row[name] for row in tables["residuals"]] for name in tables["residuals"][0]}
        written.append(write_table(out / "residuals.tsv", columns))
    drawn |= _plot_attention(predictor, _find_sample(predicted, sample))
    for name, figure in drawn.items():
        written.append(out / f"{name}.png")
        with atomic_file(written[-1]) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    run.show({**{f"plots/{name}": out / f"{name}.png" for name in drawn}, **tables})
    return written


def _find_sample(predicted: Predictions, name: str | None) -> int:
    """The number of the sample whose attention is drawn."""
    names = predicted.library.samples
    if name is None:
        return int(predicted.numbers[0])
    if name not in names:
        raise ConfigError(f"sample={name}: there is no such sample, {nearest(name, names)}")
    return names.index(name)


def _plot_attention(predictor: Predictor, number: int) -> dict[str, Any]:
    """Figures of the attention within a sample, and within the sequence of the taxon that it attends to most."""
    taxa = attention.map_taxa(predictor, number)
    drawn = {"attention": attention.plot_attention(taxa, f"taxa of {predictor.library.samples[number]}")}
    most = int(predictor.batch([number], 0)["taxa"][0, int(taxa.pooled.argmax())])
    positions = attention.map_positions(predictor, most)
    if positions is not None:
        label = taxa.labels[int(taxa.pooled.argmax())]
        drawn["sequence"] = attention.plot_attention(positions, f"positions of {label}")
    return drawn


def importance(predictor: Predictor, numbers: NDArray[np.int64]) -> dict[str, Array]:
    """Importance of each taxon over the samples that have it: (taxa,) each, NaN for taxa that no sample has.

    Returns:
        `samples`: how many have it. `attention`: its mean share in the pooling of a sample. `gradient`: mean over the
        samples of gradient times input, the gradient being that of the predicted target (of several classes, of the
        logit of the predicted one) with respect to the taxon's vector; without a target, of the mean distance to the
        other samples of a micro-batch. Its sign says whether the taxon raises or lowers it, to first order.
    """
    model = predictor.model
    assert isinstance(model, Network)
    body: Body = model.body
    assert body.pool is not None
    shares: list[Tensor] = []
    taken = body.pool.register_forward_hook(lambda pool, given, made: shares.append(pool.weights(*given).detach()))
    totals, drawn = np.zeros((3, len(predictor.library.taxa))), set[int]()
    try:
        for draw, batch in predictor.batches(numbers):
            drawn.add(draw)
            vectors = body.vectors(batch["taxa"]).detach().requires_grad_()
            real = batch["taxa"] >= 0
            embedding = body.pool_vectors(vectors, batch["counts"], real)["embedding"]
            (slope,) = torch.autograd.grad(_attributed_output(model, embedding, batch), vectors)
            effect = (slope * vectors.detach()).sum(-1)
            taxa = predictor.to_library_numbers(batch["taxa"][real].cpu().numpy())
            for total, value in zip(totals, (torch.ones_like(effect), shares.pop(), effect), strict=True):
                np.add.at(total, taxa, value[real].double().cpu().numpy())
    finally:
        taken.remove()
    with np.errstate(invalid="ignore"):
        attention, gradient = totals[1:] / np.where(totals[0] > 0, totals[0], np.nan)
    return {"samples": totals[0] / len(drawn), "attention": attention, "gradient": gradient}


def _attributed_output(model: Network, embedding: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The number whose gradient is looked at: of each row its own, added up."""
    if model.target is None:
        return losses.embedding_distances(embedding, embedding.detach()).sum() / max(1, len(embedding) - 1)
    made = model.predict_target(embedding, batch)
    if made.shape[1] == 1:
        return made.sum()
    return made.gather(1, made.argmax(1, keepdim=True)).sum()


def _tabulate_taxa(predictor: Predictor, predicted: Predictions) -> dict[str, list[Any]]:
    """Columns: the taxa that the samples have, those first that change the most in all samples together."""
    library = predicted.library
    found = importance(predictor, predicted.numbers)
    order = np.argsort(-np.nan_to_num(np.abs(found["gradient"]) * found["samples"]), kind="stable")
    order = order[found["samples"][order] > 0]
    lineages = [""] * len(library.taxa) if library.taxonomy is None else library.taxonomy
    columns = {"taxon": [library.taxa[n] for n in order], "taxonomy": [lineages[n] for n in order]}
    return columns | {name: values[order].tolist() for name, values in found.items()}


def _square() -> tuple[Any, Any]:
    """A figure and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    return figure, figure.subplots()


def _plot_distances(predicted: Predictions, truth: Array) -> Any:
    assert predicted.distances is not None
    upper = np.triu_indices(len(truth), 1)
    x, y = truth[upper], predicted.distances[upper]
    figure, axes = _square()
    axes.scatter(x, y, s=3, alpha=0.3, linewidths=0)
    ends = [min(x.min(), y.min()), max(x.max(), y.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    metric = predicted.library.config.metric.replace("_", " ")
    axes.set(xlabel=f"true {metric}", ylabel="predicted", title=f"{len(x)} pairs, r = {np.corrcoef(x, y)[0, 1]:.3f}")
    return figure


def _plot_ordination(predicted: Predictions, truth: Array) -> Any:
    """The first two principal coordinates of the true distances, and principal components of the embeddings."""
    from matplotlib.figure import Figure
    from skbio.stats.distance import DistanceMatrix
    from skbio.stats.ordination import pcoa

    found = pcoa(DistanceMatrix(np.array(truth)), dimensions=2)
    centred = predicted.embedding - predicted.embedding.mean(0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    spread = np.square(values) / np.square(values).sum()
    parts = {
        "PCoA of true distances": (found.samples.to_numpy()[:, :2], found.proportion_explained.to_numpy()[:2]),
        "PCA of embeddings": (left[:, :2] * values[:2], spread[:2]),
    }
    values, names, label = _colours(predicted)
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, (title, (places, explained)) in zip(figure.subplots(1, 2), parts.items(), strict=True):
        for number, name in enumerate(names):
            axes.scatter(*places[values == number].T, color=f"C{number % 10}", s=14, label=name)
        if not names:
            drawn = axes.scatter(*places.T, c=values, s=14)
        axes.set(title=title, xlabel=f"1 ({explained[0]:.0%})", ylabel=f"2 ({explained[1]:.0%})")
    if not names:
        figure.colorbar(drawn, ax=figure.axes, label=label)
    elif len(names) <= _MAX_LEGEND:
        figure.axes[-1].legend(title=label, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _colours(predicted: Predictions) -> tuple[Array, list[str], str]:
    """The target or group of each sample: values, the names that they index, and a label for both."""
    library = predicted.library
    if library.target is not None:
        values = np.asarray(library.target.values, dtype=np.float64)[predicted.numbers]
        return values, library.target.classes or [], library.target.name
    names, numbers = np.unique(np.array(library.groups)[predicted.numbers], return_inverse=True)
    return numbers.astype(np.float64), names.tolist(), library.config.group or "sample"


def _plot_target(predicted: Predictions) -> Any:
    """Predicted against true values, or how many samples of each class are predicted as which."""
    from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

    target, known = predicted.target, predicted.library.target
    assert target is not None and known is not None
    true = known.values[predicted.numbers]
    figure, axes = _square()
    if target.classes is None:
        ends = [min(true.min(), target.mean.min()), max(true.max(), target.mean.max())]
        error = np.clip([target.mean - target.low, target.high - target.mean], 0, None)
        axes.errorbar(true, target.mean, yerr=error, fmt=".", markersize=4, linewidth=0.5)
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xlabel=f"true {target.column}", ylabel="predicted")
        return figure
    table = confusion_matrix(true, target.mean.argmax(1), labels=range(len(target.classes)))
    ConfusionMatrixDisplay(table, display_labels=target.classes).plot(ax=axes, cmap="Blues", colorbar=False)
    axes.set(xlabel="predicted", ylabel=f"true {target.column}")
    return figure
