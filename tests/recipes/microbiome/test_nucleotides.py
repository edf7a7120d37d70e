"""Sequences as tokens."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.recipes.microbiome import nucleotides
from unisono.recipes.microbiome.nucleotides import encode, is_dna


def test_a_row_begins_with_start_and_ends_with_padding() -> None:
    rows = encode(["ACGT", "TG"], 7)
    assert rows.dtype == np.uint8
    assert rows.tolist() == [[5, 1, 2, 3, 4, 0, 0], [5, 4, 3, 0, 0, 0, 0]]


def test_without_a_length_the_longest_fits() -> None:
    assert encode(["ACGT", "T"]).shape == (2, 5)
    assert encode([]).shape == (0, 1)


def test_longer_sequences_are_cut() -> None:
    assert encode(["ACGT"], 3).tolist() == [[5, 1, 2]]
    assert encode(["ACGT"], 1).tolist() == [[5]]


def test_bases_are_read_in_either_case_and_as_rna() -> None:
    assert encode(["acgtuACGTU"]).tolist() == [[5, 1, 2, 3, 4, 4, 1, 2, 3, 4, 4]]


def test_unknown_bases_are_no_tokens() -> None:
    assert encode(["NR-Aé"]).tolist() == [[5, 0, 0, 0, 1, 0]]


def test_no_base_has_the_number_of_a_sign() -> None:
    signs = {nucleotides.PAD, nucleotides.START, nucleotides.MASK}
    assert len(signs | set(nucleotides.BASES)) == nucleotides.VOCABULARY == 7


def test_a_row_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for START"):
        encode(["ACGT"], 0)


@pytest.mark.parametrize(
    ("name", "dna"),
    [("ACGTACGTAC", True), ("acgtacgtnn", True), ("ACGTACGTA", False), ("ac5402de1ddf427ab8d2b0a8a0a44f19", False),
     ("ACGTACGTACR", False), ("ACGTACGTAC ", False), ("GTGCCAGCMGCCGCGGTAA", False), ("", False)],
)  # fmt: skip
def test_an_id_is_a_sequence_where_it_has_ten_bases_and_nothing_else(name: str, dna: bool) -> None:
    assert is_dna(name) is dna
