"""The made-up study is one like others, the same everywhere, and has something to learn."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from unisono_microbiome.settings import Simulated
from unisono_microbiome.study.library import open_library

SMALL = {"subjects": 12, "visits": 3, "taxa": 32, "bases": 40, "reads": 400}


def simulated(cache: Path, **settings) -> Simulated:
    return Simulated(kind="simulated", cache=cache, group="subject", **{**SMALL, **settings})


def test_it_is_a_study_with_everything(tmp_path: Path) -> None:
    library = open_library(simulated(tmp_path, target="kind", rarefy=200, metric="jaccard"))
    library.check()
    assert (len(library.samples), len(library.taxa), len(set(library.groups))) == (36, 32, 12)
    assert len(set(library.dna())) == 32
    assert {len(sequence) for sequence in library.dna()} == {40}
    assert library.taxonomy is not None
    assert len(set(library.taxonomy)) > 4
    assert library.target is not None
    assert library.target.classes == ["calm", "stirred"]
    assert library.config.metric == "jaccard"
    assert library.counts.sum(axis=1).min() >= 280


def test_the_share_is_that_of_the_first_clade(tmp_path: Path) -> None:
    library = open_library(simulated(tmp_path, target="share"))
    first = np.array([lineage.endswith("c__0") for lineage in library.taxonomy or []])
    counts = library.counts.toarray()
    assert library.target is not None
    assert library.target.values.std() > 0.05
    assert np.abs(counts[:, first].sum(1) / counts.sum(1) - library.target.values).max() < 1e-6


def test_it_is_made_once_and_the_same_in_any_cache(tmp_path: Path) -> None:
    one = open_library(simulated(tmp_path / "a", target="share")).training()
    (folder,) = (path.parent for path in (tmp_path / "a" / "microbiome").glob("*/table.biom"))
    before = (folder / "table.biom").stat().st_mtime_ns
    assert open_library(simulated(tmp_path / "a", target="share")).training().fingerprint == one.fingerprint
    assert (folder / "table.biom").stat().st_mtime_ns == before
    shutil.rmtree(folder)
    assert open_library(simulated(tmp_path / "a", target="share")).training().fingerprint == one.fingerprint
    other = open_library(simulated(tmp_path / "b", target="share")).training()
    assert (other.fingerprint, other.manifest["files"]) == (one.fingerprint, one.manifest["files"])
    assert open_library(simulated(tmp_path / "b", target="share", reads=500)).training().fingerprint != one.fingerprint


def test_visits_are_nearer_than_subjects_and_subjects_of_a_kind_than_others(tmp_path: Path) -> None:
    library = open_library(simulated(tmp_path, target="kind", taxa=96))
    subject, kind = np.array(library.groups), np.array(library.metadata["kind"])
    same = subject[:, None] == subject
    alike = (kind[:, None] == kind) & ~same
    for metric in ("unweighted_unifrac", "weighted_normalized_unifrac"):
        distances = library.distances(metric)
        visits, subjects, kinds = (
            distances[which].mean() for which in (same & ~np.eye(36, dtype=bool), alike, kind[:, None] != kind)
        )
        assert visits + 0.05 < subjects < kinds - 0.05
        assert distances[~np.eye(36, dtype=bool)].std() > 0.05
