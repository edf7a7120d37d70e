"""Rarefaction draws without replacement and by its address; a sample's taxa are limited as the setting says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unisono.runtime.errors import DataError
from unisono.runtime.rng import generator
from unisono_microbiome.rarefy import choose_taxa, rarefy

COUNTS = np.array([40, 0, 3, 1, 500, 7], dtype=np.int64)
TAXA = np.array([2, 3, 5, 8, 9, 11], dtype=np.int64)


def test_so_many_reads_are_left_by_their_address_and_none_more_than_there_were() -> None:
    drawn = [rarefy(COUNTS, 100, generator("test", draw)) for draw in range(50)]
    for left in drawn:
        assert left.sum() == 100
        assert ((left >= 0) & (left <= COUNTS)).all()
    assert rarefy(COUNTS, 100, generator("test", 1)).tolist() == drawn[1].tolist() != drawn[2].tolist()
    assert rarefy(COUNTS, int(COUNTS.sum()), generator("test")).tolist() == COUNTS.tolist()


def test_draws_are_hypergeometric() -> None:
    """Mean and variance of each taxon, within five standard errors; with replacement the variance is 20 % more."""
    total, depth, draws = COUNTS.sum(), 100, 4000
    left = np.array([rarefy(COUNTS, depth, generator("many", draw)) for draw in range(draws)])
    share = COUNTS / total
    mean = depth * share
    variance = depth * share * (1 - share) * (total - depth) / (total - 1)
    assert (np.abs(left.mean(0) - mean) <= 5 * np.sqrt(variance / draws)).all()
    common = variance > 1
    assert common.sum() >= 3
    ratio = left.var(0)[common] / variance[common]
    assert (np.abs(ratio - 1) < 0.12).all()


def test_a_sample_with_fewer_reads_or_more_than_numpy_can_draw_from_is_refused() -> None:
    with pytest.raises(DataError, match=r"551 reads cannot be rarefied to 552: lower data\.rarefy"):
        rarefy(COUNTS, 552, generator("test"))
    with pytest.raises(DataError, match="too deep"):
        rarefy(np.array([10**9, 5]), 10, generator("test"))


@pytest.mark.parametrize(
    ("limit", "keep", "taxa", "reads"),
    [
        (None, "first", [2, 5, 8, 9, 11], [40, 3, 1, 500, 7]),  # taxa without reads are none of a sample
        (3, "first", [2, 5, 8], [40, 3, 1]),
        (None, "abundance", [9, 2, 11, 5, 8], [500, 40, 7, 3, 1]),
        (3, "abundance", [9, 2, 11], [500, 40, 7]),
    ],
)
def test_taxa_are_kept_in_the_tables_order_or_the_most_abundant_first(
    limit: int | None, keep: Any, taxa: list[int], reads: list[int]
) -> None:
    chosen, counts = choose_taxa(TAXA, COUNTS, limit, keep, generator("test"))
    assert (chosen.tolist(), counts.tolist()) == (taxa, reads)
    equal = np.array([5, 9, 5, 9, 5, 5])  # the first of equals
    assert choose_taxa(TAXA, equal, 4, "abundance", generator("test"))[0].tolist() == [3, 8, 2, 5]


def test_random_ones_are_kept_by_their_address_in_the_tables_order() -> None:
    seen = set()
    for draw in range(40):
        taxa, counts = choose_taxa(TAXA, COUNTS, 3, "random", generator("test", draw))
        again, _ = choose_taxa(TAXA, COUNTS, 3, "random", generator("test", draw))
        assert taxa.tolist() == again.tolist() == sorted(set(taxa.tolist()))
        assert counts.tolist() == [COUNTS[TAXA.tolist().index(taxon)] for taxon in taxa]
        seen.add(tuple(taxa.tolist()))
    assert len(seen) > 5
    assert {taxon for chosen in seen for taxon in chosen} == {2, 5, 8, 9, 11}
    assert choose_taxa(TAXA, COUNTS, 5, "random", generator("test"))[0].tolist() == [2, 5, 8, 9, 11]
