"""Sequences as tokens, and which are masked: so many, known ones only, in spans where asked for, by the generator."""

from __future__ import annotations

import numpy as np
import pytest

from unisono_microbiome import nucleotides
from unisono_microbiome.nucleotides import choose_masked, encode, is_dna
from unisono_microbiome.settings import Masking


@pytest.mark.parametrize(
    ("sequences", "length", "rows"),
    [
        (["ACGT", "TG"], 7, [[5, 1, 2, 3, 4, 0, 0], [5, 4, 3, 0, 0, 0, 0]]),  # START, then bases, then padding
        (["ACGT", "T"], None, [[5, 1, 2, 3, 4], [5, 4, 0, 0, 0]]),  # the longest fits
        (["ACGT"], 3, [[5, 1, 2]]),
        (["ACGT"], 1, [[5]]),
        (["acgtuACGTU"], None, [[5, 1, 2, 3, 4, 4, 1, 2, 3, 4, 4]]),
        (["NR-Aé"], None, [[5, 0, 0, 0, 1, 0]]),  # unknown bases are no tokens
    ],
)
def test_sequences_are_rows_of_tokens(sequences: list[str], length: int | None, rows: list[list[int]]) -> None:
    made = encode(sequences, length)
    assert (made.dtype, made.tolist()) == (np.uint8, rows)
    assert encode([]).shape == (0, 1)


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


# masks ------------------------------------------------------------------------------------------------------------


def sequences(count: int = 40) -> np.ndarray:
    """Of 20 to 99 bases, every seventh of which is unknown; the last has none that is known."""
    rng = np.random.default_rng(3)
    made = ["".join(rng.choice(list("ACGT"), size=rng.integers(20, 100))) for _ in range(count)]
    made = ["".join("N" if place % 7 == 3 else base for place, base in enumerate(one)) for one in made]
    return encode([*made, "NNNN"])


@pytest.mark.parametrize("kind", ["random", "spans"])
def test_of_each_sequence_its_share_of_known_nucleotides_is_hidden(kind: str) -> None:
    tokens = sequences()
    masked = choose_masked(tokens, Masking(kind=kind, share=0.2), np.random.default_rng(1))
    known = np.isin(tokens, nucleotides.BASES)
    assert not (masked & ~known).any()
    expected = np.rint(0.2 * known.sum(1))
    assert expected[-1] == 0 < expected[0]
    assert masked.sum(1).tolist() == expected.tolist()


def test_at_least_one_is_hidden_where_one_is_known() -> None:
    tokens = encode(["AC", "NA", "NN"])
    for kind in ("random", "spans"):
        assert choose_masked(tokens, Masking(kind=kind), np.random.default_rng(0)).sum(1).tolist() == [
            1,
            1,
            0,
        ]


def test_the_generator_alone_decides() -> None:
    tokens = sequences()
    for kind in ("random", "spans"):
        masks = [choose_masked(tokens, Masking(kind=kind), np.random.default_rng(seed)) for seed in (1, 1, 2)]
        assert (masks[0] == masks[1]).all()
        assert (masks[0] != masks[2]).any()


def test_single_nucleotides_are_hidden_evenly() -> None:
    tokens = encode(["ACGTACGTAC"] * 4000)
    often = choose_masked(tokens, Masking(share=0.3), np.random.default_rng(1)).mean(0)
    assert often[0] == 0
    assert np.allclose(often[1:], 0.3, atol=0.03)


def test_spans_are_runs() -> None:
    tokens = encode(["ACGT" * 25] * 200)
    lengths = {}
    for kind in ("random", "spans"):
        masked = choose_masked(tokens, Masking(kind=kind), np.random.default_rng(1))
        edges = np.diff(np.pad(masked.astype(int), ((0, 0), (1, 1))), axis=1)
        lengths[kind] = masked.sum() / (edges == 1).sum()
    assert lengths["random"] < 1.3
    assert 3 < lengths["spans"] < 6
