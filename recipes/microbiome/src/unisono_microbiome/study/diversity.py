"""Distances between samples and their diversity: computed once by scikit-bio, and cached.

A cache entry's name contains all that determines it: the counts, the tree, the metric and the library's version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from unisono import ConfigError, DataError, compute_array_once, generator
from unisono.recipe_tools import import_extra
from unisono_microbiome.rarefy import rarefy
from unisono_microbiome.settings import Metric, PairMetric
from unisono_microbiome.study.sparse import select_blocks, split_rows
from unisono_microbiome.study.table import CountTable
from unisono_microbiome.study.tree import Tree

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_BYTES = 8  # of a float
Make = Callable[[], NDArray[Any]]

PHYLOGENETIC = frozenset({"unweighted_unifrac", "weighted_unifrac", "weighted_normalized_unifrac", "faith_pd"})


def pairwise_distances(
    metric: PairMetric, table: CountTable, tree: Tree | None, cache: Path | None
) -> NDArray[np.float64]:
    """Distances between all pairs of non-empty samples, (samples, samples) float64, symmetric, with a diagonal of 0.

    Bray-Curtis is of the shares of the reads, so that it compares compositions and not depths; Jaccard, as unweighted
    UniFrac, is of presence alone. Aitchison's is the Euclidean one of centred log-ratios of the reads plus 1.

    Raises:
        ConfigError: for UniFrac without a tree.
        DataError: for taxa that are not in the tree, and where memory does not suffice.
    """
    size = len(table.samples)
    return _compute_cached(metric, table, tree, cache, (size, size), lambda: _compute_distances(metric, table, tree))


def faith_pd(table: CountTable, tree: Tree | None, cache: Path | None) -> NDArray[np.float64]:
    """Branch length from a sample's taxa to the root, (samples,) float64; errors as of `pairwise_distances`."""
    shape = (len(table.samples),)
    return _compute_cached("faith_pd", table, tree, cache, shape, lambda: _compute_faith_pd(table, tree))


def shannon(table: CountTable) -> NDArray[np.float64]:
    """Shannon diversity of each sample in bits, (samples,) float64."""
    counts, depths = table.counts, table.depths
    found = np.zeros(len(depths))
    for first, last in split_rows(counts.indptr):
        rows = np.repeat(np.arange(last - first), np.diff(counts.indptr[first : last + 1]))
        shares = counts.data[counts.indptr[first] : counts.indptr[last]] / depths[first:last][rows]
        found[first:last] = np.bincount(rows, -shares * np.log2(shares), last - first)
    return found


def rarefy_once(table: CountTable, depth: int) -> CountTable:
    """Rarefy a table: `depth` reads of each sample, drawn by the sample's name, so always the same ones."""
    counts = table.counts
    every = np.arange(len(table.samples)), np.arange(len(table.taxa))
    whole = select_blocks(counts, *every, f"{depth} reads of each of {len(table.samples)} samples")

    def generate() -> Iterator[csr_array]:
        names = iter(table.samples)
        for block in whole.generate():
            for begin, end in pairwise(block.indptr):
                drawn = rarefy(block.data[begin:end], depth, generator("rarefied once", depth, next(names)))
                block.data[begin:end] = drawn
            block.eliminate_zeros()
            yield block

    most = min(whole.entries, depth * len(table.samples))
    kept = table.storage.keep(
        replace(whole, entries=most, generate=generate),
        lambda: ["rarefied once", version("numpy"), table.digest, depth],
    )
    return CountTable(table.samples, table.taxa, kept, table.taxonomy, table.storage)


def _compute_distances(metric: PairMetric, table: CountTable, tree: Tree | None) -> NDArray[np.float64]:
    _check_memory(metric, table)
    part = tree.subtree(table.taxa) if metric in PHYLOGENETIC and tree is not None else None  # refuses, then imports
    from skbio.diversity import beta_diversity

    counts = table.counts.toarray()
    if metric == "bray_curtis":
        found = beta_diversity("braycurtis", counts / counts.sum(axis=1, keepdims=True), table.samples)
    elif metric == "jaccard":
        found = beta_diversity("jaccard", counts > 0, table.samples)
    elif metric == "aitchison":
        from skbio.stats.composition import clr

        found = beta_diversity("euclidean", clr(counts + 1.0), table.samples, validate=False)
    else:
        normalised = {"normalized": metric == "weighted_normalized_unifrac"} if metric.startswith("weighted") else {}
        name = "weighted_unifrac" if normalised else metric
        found = beta_diversity(name, counts, table.samples, taxa=table.taxa, tree=part, **normalised)
    return np.asarray(found.data, dtype=np.float64)


def _compute_faith_pd(table: CountTable, tree: Tree | None) -> NDArray[np.float64]:
    _check_memory("faith_pd", table)
    assert tree is not None
    part = tree.subtree(table.taxa)
    from skbio.diversity import alpha_diversity

    found = alpha_diversity("faith_pd", table.counts.toarray(), table.samples, taxa=table.taxa, tree=part)
    return np.asarray(found.to_numpy(), dtype=np.float64)


def _compute_cached(
    metric: Metric, table: CountTable, tree: Tree | None, cache: Path | None, shape: tuple[int, ...], make: Make
) -> NDArray[np.float64]:
    """What is computed, from the cache where it was computed before."""
    if metric in PHYLOGENETIC and tree is None:
        raise ConfigError(
            f"data.metric={metric} needs the tree of the taxa: set data.tree, "
            + ("or choose another metric" if metric == "faith_pd" else "or provide distances with data.distances")
        )

    def is_valid(found: NDArray[Any]) -> bool:
        return found.shape == shape and found.dtype == np.float64 and bool(np.isfinite(found).all())

    import_extra("skbio", "microbiome", "distances")
    address = [metric, table.digest, tree.digest if tree and metric in PHYLOGENETIC else None, version("scikit-bio")]
    return compute_array_once("microbiome", address, make, is_valid=is_valid, cache=cache)


def _check_memory(metric: Metric, table: CountTable) -> None:
    """Refuse what would not fit: scikit-bio's tables are dense, and those of trees have a column for every branch."""
    columns = len(table.taxa) * (3 if metric in PHYLOGENETIC else 2)
    needed = len(table.samples) * (columns + 2 * len(table.samples)) * _BYTES
    there = psutil.virtual_memory().available
    if needed > there:
        raise DataError(
            f"{metric} of {len(table.samples)} samples and {len(table.taxa)} taxa needs about {needed / 1e9:.1f} GB of "
            f"memory, but {there / 1e9:.1f} GB are free: compute it elsewhere, UniFrac e.g. with `ssu` of "
            "unifrac-binaries, and provide it with data.distances"
        )
