"""Sequences as tokens: one per base, one for the beginning, and one for masked positions, and which are masked."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from unisono_microbiome.settings import Masking

PAD, A, C, G, T, START, MASK = range(7)
VOCABULARY = 7
BASES = (A, C, G, T)
"""What can be masked and predicted."""

_SPAN_LENGTHS = (3, 6)  # consecutive nucleotides that are masked: 3 to 5
_SHORTEST = 10  # letters of an id that is taken for a sequence, not for a name such as 'TAG'
_SEQUENCE = re.compile(rf"[ACGTUN]{{{_SHORTEST},}}", re.IGNORECASE)

_TOKEN_OF = np.full(256, PAD, dtype=np.uint8)
for _letters, _token in (("Aa", A), ("Cc", C), ("Gg", G), ("TtUu", T)):
    for _letter in _letters:
        _TOKEN_OF[ord(_letter)] = _token


def encode(sequences: Sequence[str], length: int | None = None) -> NDArray[np.uint8]:
    """Sequences as rows of tokens, (taxa, length): START, then a token per base, then padding.

    A base that is not known (`N` and all other letters but A, C, G, T and U) is 0, as padding is. A row has `length`
    tokens, to which longer sequences are cut; by default what the longest needs.

    >>> encode(["ACGT", "NT"]).tolist()
    [[5, 1, 2, 3, 4], [5, 0, 4, 0, 0]]
    """
    width = 1 + max(map(len, sequences), default=0) if length is None else length
    if width < 1:
        raise ValueError(f"a row of {width} tokens has no room for START")
    rows = np.full((len(sequences), width), PAD, dtype=np.uint8)
    rows[:, 0] = START
    for row, sequence in zip(rows, sequences, strict=True):
        letters = np.frombuffer(sequence[: width - 1].encode("ascii", errors="replace"), dtype=np.uint8)
        row[1 : 1 + len(letters)] = _TOKEN_OF[letters]
    return rows


def is_dna(name: str) -> bool:
    """Whether an id is a sequence: ten or more of the letters A, C, G, T, U and N.

    >>> is_dna("TACGGAGGATCC"), is_dna("1c86153e1b13ab5322c96f2602b73513"), is_dna("TAG")
    (True, False, False)
    """
    return _SEQUENCE.fullmatch(name) is not None


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
