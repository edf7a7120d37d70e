"""Distances are what their definitions say, computed once, and never those of other data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest
from scipy.sparse import csr_array
from skbio.diversity import alpha_diversity

from recipes.microbiome.tests import studies
from recipes.microbiome.tests.studies import COUNTS, NEWICK, SAMPLES, TAXA
from unisono.runtime.errors import ConfigError, DataError
from unisono_microbiome.study import diversity
from unisono_microbiome.study.table import CountTable
from unisono_microbiome.study.tree import Tree


def table(counts: np.ndarray = COUNTS, taxa: str = TAXA) -> CountTable:
    return CountTable(list(SAMPLES[: len(counts)]), list(taxa), csr_array(counts.astype(np.int64)))


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "t.nwk").write_text(NEWICK)
    return Tree(tmp_path / "t.nwk")


DEFINED = {
    "unweighted_unifrac": studies.unweighted,
    "weighted_unifrac": lambda counts: studies.weighted(counts, normalised=False),
    "weighted_normalized_unifrac": lambda counts: studies.weighted(counts, normalised=True),
    "bray_curtis": studies.bray_curtis,
    "jaccard": studies.jaccard,
    "aitchison": studies.aitchison,
}


@pytest.mark.parametrize("metric", DEFINED)
def test_distances_are_as_defined(tmp_path: Path, tree: Tree, metric) -> None:
    defined = DEFINED[metric](COUNTS)
    found = diversity.pairwise_distances(metric, table(), tree, tmp_path)
    assert found.dtype == np.float64
    assert np.abs(found - defined).max() < 1e-12
    assert np.array_equal(found, found.T)
    assert not np.diag(found).any()
    others = [other(COUNTS) for name, other in DEFINED.items() if name != metric]
    assert all(np.abs(found - other).max() > 0.01 for other in others)


def test_faith_pd_is_as_defined(tmp_path: Path, tree: Tree) -> None:
    found = diversity.faith_pd(table(), tree, tmp_path)
    assert np.abs(found - studies.faith_pd(COUNTS)).max() < 1e-12
    assert len(set(found.round(9))) > 4


def test_a_tree_with_more_taxa_changes_nothing(tmp_path: Path, tree: Tree) -> None:
    """All that is above the last common branch counts, so the root has to stay where it was."""
    counts = COUNTS[[0, 5, 7]].copy()
    counts[:, 3:] = 0  # only A, B and C, below one branch of the root
    for metric in ("unweighted_unifrac", "weighted_normalized_unifrac"):
        found = diversity.pairwise_distances(metric, table(counts[:, :3], "ABC"), tree, tmp_path)
        assert np.abs(found - DEFINED[metric](counts)).max() < 1e-12
    assert (
        np.abs(diversity.faith_pd(table(counts[:, :3], "ABC"), tree, tmp_path) - studies.faith_pd(counts)).max() < 1e-12
    )


def test_shannon_diversity_is_that_of_scikit_bio() -> None:
    expected = alpha_diversity("shannon", COUNTS, base=2).to_numpy()
    assert np.abs(diversity.shannon(table()) - expected).max() < 1e-12


def test_depth_is_nothing_to_bray_curtis(tmp_path: Path) -> None:
    deeper = COUNTS * np.array([[1], [2], [3], [40], [5], [6], [7], [8]])
    one, other = (
        diversity.pairwise_distances("bray_curtis", table(counts), None, tmp_path) for counts in (COUNTS, deeper)
    )
    assert np.abs(one - other).max() < 1e-12


def test_what_is_computed_is_kept_until_something_changes(tmp_path: Path, tree: Tree, monkeypatch) -> None:
    made = []
    compute = diversity._compute_distances
    monkeypatch.setattr(diversity, "_compute_distances", lambda *given: made.append(given[0]) or compute(*given))

    def distances(metric="unweighted_unifrac", counts=COUNTS, of: Tree = tree) -> np.ndarray:
        return diversity.pairwise_distances(metric, table(counts), of, tmp_path)

    first = distances()
    assert np.array_equal(distances(), first)
    assert len(made) == 1
    changed = COUNTS.copy()
    changed[0, 1] = 1
    assert not np.array_equal(distances(counts=changed), first)
    (tmp_path / "u.nwk").write_text(NEWICK.replace("A:1", "A:9"))
    assert not np.array_equal(distances(of=Tree(tmp_path / "u.nwk")), first)
    distances("jaccard")
    assert len(made) == 4
    monkeypatch.setattr(diversity, "version", lambda package: "another")
    distances()
    assert len(made) == 5


@pytest.mark.parametrize("damage", ["short", "nan"])
def test_what_is_damaged_in_the_cache_is_computed_again(tmp_path: Path, damage: str) -> None:
    first = diversity.pairwise_distances("jaccard", table(), None, tmp_path)
    (entry,) = (tmp_path / "microbiome").glob("*/array.npy")
    np.save(entry, first[:3, :3] if damage == "short" else np.full_like(first, np.nan))
    assert np.array_equal(diversity.pairwise_distances("jaccard", table(), None, tmp_path), first)
    assert np.array_equal(np.load(entry), first)


def test_what_needs_a_tree_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.metric=weighted_unifrac needs .* data\.tree, or provide distances"):
        diversity.pairwise_distances("weighted_unifrac", table(), None, tmp_path)
    with pytest.raises(ConfigError, match=r"faith_pd needs the tree of the taxa: set data\.tree"):
        diversity.faith_pd(table(), None, tmp_path)


def test_what_does_not_fit_into_memory_is_refused_before_it_is_tried(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(
        DataError, match=r"jaccard of 8 samples and 6 taxa needs about .* GB .*provide it with data\.distances"
    ):
        diversity.pairwise_distances("jaccard", table(), None, tmp_path)


def test_a_table_is_rarefied_once_by_the_names_of_its_samples() -> None:
    one = diversity.rarefy_once(table(), 8)
    assert one.depths.tolist() == [8] * 8
    assert (one.counts.toarray() <= COUNTS).all()
    assert one.counts.nnz == (one.counts.toarray() > 0).sum()
    order = np.array([5, 2, 7, 0])
    other = diversity.rarefy_once(table().select(order, np.arange(6)), 8)
    assert np.array_equal(other.counts.toarray(), one.counts.toarray()[order])
    assert diversity.rarefy_once(table(), 9).digest != one.digest
    assert table().counts.toarray().tolist() == COUNTS.tolist()
