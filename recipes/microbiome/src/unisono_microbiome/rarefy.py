"""Draws the reads and taxa of a sample that a model sees, with the given random generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono import DataError
from unisono_microbiome.settings import Keep

Numbers = NDArray[np.int64]

_MAX_READS = 1_000_000_000  # reads that NumPy draws from by marginals


def rarefy(counts: Numbers, depth: int, rng: np.random.Generator) -> Numbers:
    """Draw `depth` of a sample's reads (taxa,) without replacement, as if it had been sequenced less deeply.

    Raises:
        DataError: if there are fewer reads, or too many to draw from.
    """
    total = int(counts.sum())
    if total < depth:
        raise DataError(
            f"a sample of {total} reads cannot be rarefied to {depth}: lower data.rarefy, or skip such samples with "
            "data.leave_out=[shallow]"
        )
    if total >= _MAX_READS:
        raise DataError(
            f"a sample of {total} reads is too deep to be rarefied: divide its counts, or set data.rarefy=null"
        )
    return rng.multivariate_hypergeometric(counts, depth, method="marginals")


def choose_taxa(
    taxa: Numbers, counts: Numbers, limit: int | None, keep: Keep, rng: np.random.Generator
) -> tuple[Numbers, Numbers]:
    """The taxa of a sample that a model sees, with their reads; those without reads are none of them.

    Args:
        taxa: numbers of the taxa, (taxa,), ascending.
        counts: reads of each, (taxa,).
        limit: of how many; None for all.
        keep: `abundance`: those with the most reads, the first of equals; `first`: those with the lowest numbers;
            `random`: any, drawn anew.
        rng: for `random`, else not used.

    Returns:
        Numbers and reads, (kept,): by `abundance` in descending order of reads, else in ascending order of numbers.
    """
    there = counts > 0
    taxa, counts = taxa[there], counts[there]
    if keep == "abundance":
        chosen = np.argsort(-counts, kind="stable")[:limit]
    elif keep == "first" or limit is None or limit >= len(taxa):
        chosen = np.arange(len(taxa))[:limit]
    else:
        chosen = np.sort(rng.choice(len(taxa), limit, replace=False))
    return taxa[chosen], counts[chosen]
