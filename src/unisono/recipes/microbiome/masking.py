"""Chooses which nucleotides of a sequence are masked, with the given random generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.microbiome.nucleotides import BASES
from unisono.recipes.microbiome.settings import Masking

_SPAN_LENGTHS = (3, 6)  # consecutive nucleotides: 3 to 5


def choose_masked(
    tokens: NDArray[np.uint8], masking: Masking, rng: np.random.Generator
) -> NDArray[np.bool_]:  # (sequences, length) -> (sequences, length)
    """Masked positions: a share of each sequence's known nucleotides, at least one if there are any."""
    known = np.isin(tokens, BASES)
    wanted = np.where(known.any(1), np.maximum(1, np.rint(masking.share * known.sum(1))), 0).astype(np.int64)
    if masking.kind == "random":
        keys = np.where(known, rng.random(tokens.shape), 2.0)
        rank = keys.argsort(axis=1).argsort(axis=1)
        chosen: NDArray[np.bool_] = rank < wanted[:, None]
        return chosen
    return np.stack([_choose_spans(row, int(count), rng) for row, count in zip(known, wanted, strict=True)])


def _choose_spans(known: NDArray[np.bool_], wanted: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Spans until enough positions are masked; the last one is cut."""
    chosen = np.zeros_like(known)
    while (missing := wanted - int(chosen.sum())) > 0:
        start = int(rng.choice(np.flatnonzero(known & ~chosen)))
        free = known[start:] & ~chosen[start:]
        length = min(int(rng.integers(*_SPAN_LENGTHS)), missing)
        chosen[start : start + length] |= free[:length]
    return chosen
