"""Which nucleotides are hidden: so many, known ones only, in spans where they are asked for, by the generator alone."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.recipes.microbiome import nucleotides
from unisono.recipes.microbiome.masking import choose_masked
from unisono.recipes.microbiome.settings import Masking


def sequences(count: int = 40) -> np.ndarray:
    """Of 20 to 99 bases, every seventh of which is unknown; the last has none that is known."""
    rng = np.random.default_rng(3)
    made = ["".join(rng.choice(list("ACGT"), size=rng.integers(20, 100))) for _ in range(count)]
    made = ["".join("N" if place % 7 == 3 else base for place, base in enumerate(one)) for one in made]
    return nucleotides.encode([*made, "NNNN"])


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
    tokens = nucleotides.encode(["AC", "NA", "NN"])
    for kind in ("random", "spans"):
        assert choose_masked(tokens, Masking(kind=kind), np.random.default_rng(0)).sum(1).tolist() == [1, 1, 0]


def test_the_generator_alone_decides() -> None:
    tokens = sequences()
    for kind in ("random", "spans"):
        masks = [choose_masked(tokens, Masking(kind=kind), np.random.default_rng(seed)) for seed in (1, 1, 2)]
        assert (masks[0] == masks[1]).all()
        assert (masks[0] != masks[2]).any()


def test_single_nucleotides_are_hidden_evenly() -> None:
    tokens = nucleotides.encode(["ACGTACGTAC"] * 4000)
    often = choose_masked(tokens, Masking(share=0.3), np.random.default_rng(1)).mean(0)
    assert often[0] == 0
    assert np.allclose(often[1:], 0.3, atol=0.03)


def test_spans_are_runs() -> None:
    tokens = nucleotides.encode(["ACGT" * 25] * 200)
    lengths = {}
    for kind in ("random", "spans"):
        masked = choose_masked(tokens, Masking(kind=kind), np.random.default_rng(1))
        edges = np.diff(np.pad(masked.astype(int), ((0, 0), (1, 1))), axis=1)
        lengths[kind] = masked.sum() / (edges == 1).sum()
    assert lengths["random"] < 1.3
    assert 3 < lengths["spans"] < 6
