"""Rarefaction draws without replacement and by its address; a sample's taxa are limited as the setting says."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.recipes.microbiome.rarefy import choose_taxa, rarefy
from unisono.runtime.errors import DataError
from unisono.runtime.rng import generator

COUNTS = np.array([40, 0, 3, 1, 500, 7], dtype=np.int64)
TAXA = np.array([2, 3, 5, 8, 9, 11], dtype=np.int64)


def test_so_many_reads_are_left_and_none_more_than_there_were() -> None:
    for draw in range(50):
        left = rarefy(COUNTS, 100, generator("test", draw))
        assert left.sum() == 100
        assert (left <= COUNTS).all()
        assert (left >= 0).all()


def test_all_reads_are_left_where_all_are_drawn() -> None:
    assert rarefy(COUNTS, int(COUNTS.sum()), generator("test")).tolist() == COUNTS.tolist()


def test_the_same_address_draws_the_same_and_another_another() -> None:
    one, same, other = (rarefy(COUNTS, 100, generator("test", draw)) for draw in (1, 1, 2))
    assert one.tolist() == same.tolist()
    assert one.tolist() != other.tolist()


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


def test_a_sample_with_fewer_reads_is_refused() -> None:
    with pytest.raises(DataError, match=r"551 reads cannot be rarefied to 552: lower data\.rarefy"):
        rarefy(COUNTS, 552, generator("test"))


def test_a_sample_deeper_than_numpy_can_draw_from_is_refused() -> None:
    with pytest.raises(DataError, match="too deep"):
        rarefy(np.array([10**9, 5]), 10, generator("test"))


def test_taxa_without_reads_are_none_of_a_sample() -> None:
    taxa, counts = choose_taxa(TAXA, COUNTS, None, "first", generator("test"))
    assert (taxa.tolist(), counts.tolist()) == ([2, 5, 8, 9, 11], [40, 3, 1, 500, 7])


def test_the_most_abundant_are_kept_in_descending_order_and_the_first_of_equals() -> None:
    taxa, counts = choose_taxa(TAXA, COUNTS, 3, "abundance", generator("test"))
    assert (taxa.tolist(), counts.tolist()) == ([9, 2, 11], [500, 40, 7])
    equal = np.array([5, 9, 5, 9, 5, 5])
    assert choose_taxa(TAXA, equal, 4, "abundance", generator("test"))[0].tolist() == [3, 8, 2, 5]


def test_the_order_does_not_depend_on_whether_a_limit_cuts() -> None:
    whole, _ = choose_taxa(TAXA, COUNTS, None, "abundance", generator("test"))
    assert choose_taxa(TAXA, COUNTS, 4, "abundance", generator("test"))[0].tolist() == whole[:4].tolist()


def test_the_first_are_kept_in_the_tables_order() -> None:
    assert choose_taxa(TAXA, COUNTS, 3, "first", generator("test"))[0].tolist() == [2, 5, 8]


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
