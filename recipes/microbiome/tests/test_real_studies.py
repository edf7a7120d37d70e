"""Two real studies: what they hold, and distances as others have computed them. Skipped where they are not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.real_data import real
from unisono.runtime.errors import DataError
from unisono_microbiome.nucleotides import encode
from unisono_microbiome.settings import Study
from unisono_microbiome.study.library import Library, open_library


def opened(name: str, **settings: Any) -> Library:
    folder = real(name)
    files = {"table": "table.biom", "metadata": "metadata.tsv", "tree": "tree.nwk", "taxonomy": "taxonomy.tsv"}
    paths = {key: folder / file for key, file in files.items()}
    return open_library(Study(kind="study", **{**paths, "group": "host_subject_id", "rarefy": 1000, **settings}))


def shipped(name: str, key: str) -> np.ndarray:
    with np.load(real(name) / "unifrac.npz") as arrays:
        return np.asarray(arrays[key], dtype=np.float64)


def test_ibd_is_294_samples_of_16_subjects_and_1906_sequences(tmp_path: Path) -> None:
    library = opened("microbiome_ibd", target="ibd", fasta=real("microbiome_ibd") / "rep-seqs.fasta")
    library.check()
    facts = library.facts()
    assert (facts["samples"], facts["taxa"], facts["groups"]) == (294, 1906, 16)
    assert facts["taxa_per_sample"] == {"min": 10, "median": 153.5, "max": 303}
    told = facts["target"]
    assert {c: told["training"][c] + told["held_out"][c] for c in told["training"]} == {"Control": 170, "Crohns": 124}
    assert library.dna() == library.taxa
    tokens = encode(library.dna())
    assert tokens.shape == (1906, 101)
    assert set(np.unique(tokens)) == {1, 2, 3, 4, 5}
    assert library.taxonomy is not None
    assert library.taxonomy[0].startswith("k__Bacteria; p__Bacteroidetes")


def test_ibd_subjects_are_never_on_both_sides() -> None:
    held = []
    for fold in range(6):
        library = opened("microbiome_ibd", fold=fold)
        subjects = np.array(library.metadata["host_subject_id"])
        sides = [set(subjects[rows.rows]) for rows in (library.training(), library.held_out())]
        assert not sides[0] & sides[1]
        held += sorted(sides[1])
    assert len(held) == len(set(held)) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric", "key"),
    [
        ("microbiome_ibd", "unweighted_unifrac", "unweighted"),
        ("microbiome_ibd", "weighted_normalized_unifrac", "weighted_normalized"),
        ("microbiome_ecam", "unweighted_unifrac", "unweighted"),
    ],
)
def test_unifrac_is_the_shipped_one_computed_or_read(tmp_path: Path, name: str, metric: Any, key: str) -> None:
    expected = shipped(name, key)
    computed = opened(name, metric=metric, cache=tmp_path).distances()
    assert expected.std() > 0.05
    assert np.abs(computed - expected).max() < 1e-6
    read = opened(name, metric=metric, distances=real(name) / "unifrac.npz").distances()
    assert np.abs(read - expected).max() < 1e-9


def test_ibd_faith_pd_is_that_of_the_metadata(tmp_path: Path) -> None:
    library = opened("microbiome_ibd", cache=tmp_path)
    told = np.array(library.metadata["faith_pd"], dtype=np.float64)
    assert told.std() > 1
    assert np.abs(library.diversity("faith_pd") - told).max() < 0.5e-4 + 1e-9  # it is printed with four decimals


def test_ecam_is_a_regression_whose_ids_are_no_sequences(tmp_path: Path) -> None:
    library = opened("microbiome_ecam", target="month_of_life")
    library.check()
    facts = library.facts()
    assert (facts["samples"], facts["taxa"], facts["groups"]) == (510, 2120, 30)
    assert facts["target"]["kind"] == "regression"
    assert library.sequences is None
    with pytest.raises(
        DataError, match=r"ids of 2120 of 2120 taxa .* not sequences.* set data\.fasta .* or model\.encoder=taxon"
    ):
        library.dna()
