"""Generators that a script does not seed are seeded by rank, and said."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from unisono.proof.scripts.start.seeds import Seeds, describe_unseeded


def draw(rank: int, seeded: bool) -> tuple[float, float, float, list[str]]:
    seeds = Seeds(rank)
    with seeds.installed():
        if seeded:
            torch.manual_seed(1)
            random.seed(1)
        drawn = float(torch.rand(())), random.random(), float(np.random.rand())
        return *drawn, seeds.find_unseeded()


@pytest.mark.parametrize("seeded", [False, True])
def test_what_is_drawn_without_a_seed_repeats_and_is_another_on_every_rank(seeded: bool) -> None:
    first, again, other = draw(0, seeded), draw(0, seeded), draw(1, seeded)
    assert first == again
    assert [a == b for a, b in zip(first[:3], other[:3], strict=True)] == [seeded, seeded, False]
    assert first[3] == (["numpy"] if seeded else ["numpy", "python", "torch"])
    assert describe_unseeded(first[3]).endswith("NumPy" if seeded else "NumPy, Python's random, torch")


def test_a_generator_that_is_not_used_is_not_said() -> None:
    seeds = Seeds(0)
    with seeds.installed():
        assert seeds.find_unseeded() == []
    assert describe_unseeded([]) == ""
