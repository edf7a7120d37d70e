"""Sequences as tokens: one per base, one for the beginning, and one for masked positions."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PAD, A, C, G, T, START, MASK = range(7)
VOCABULARY = 7
BASES = (A, C, G, T)
"""What can be masked and predicted."""

_SHORTEST = 10  # letters of an id that is taken for a sequence, not for a name such as 'TAG'
_SEQUENCE = re.compile(rf"[ACGTUN]{{{_SHORTEST},}}", re.IGNORECASE)

_TOKEN_OF = np.full(256, PAD, dtype=np.uint8)
for _letters, _token in (("Aa", A), ("Cc", C), ("Gg", G), ("TtUu", T)):
    for _letter in _letters:
        _TOKEN_OF[ord(_letter)] = _token


def encode(sequences: Sequence[str], length: int | None = None) -> NDArray[np.uint8]:
    """Sequences as rows of tokens, (taxa, length): START, then a token per base, then padding.

    A base that is not known (`N` and all other letters but A, C, G, T and U) is 0, as padding is.

    Args:
        sequences: of any length.
        length: tokens of a row, START among them; longer sequences are cut. None: what the longest needs.

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
