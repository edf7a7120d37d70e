"""Sketches of what a forward pass returns, and what two passes tell of a model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from unisono.proof.recording.output_digest import build_sketch, mixed_rows, row_differs, sketch_distance


@pytest.mark.parametrize("where", [0, 5, 999])
def test_a_difference_anywhere_shows_in_its_size(where: int) -> None:
    one = np.random.default_rng(0).normal(size=1000)
    other = one.copy()
    other[where] += 1e-6
    size, name = sketch_distance({"out": build_sketch(other)}, {"out": build_sketch(one)})
    assert size == pytest.approx(1e-6 / np.linalg.norm(one), rel=1e-3)
    assert name == "out"


def test_a_difference_everywhere_shows_too() -> None:
    one = np.ones(1000)
    size, _ = sketch_distance({"out": build_sketch(one + 1e-9)}, {"out": build_sketch(one)})
    assert 1e-10 < size < 1e-7


def test_equal_passes_have_no_distance_and_missing_tensors_an_infinite_one() -> None:
    one = {"out": build_sketch(np.ones(3)), "more": build_sketch(np.ones(3) * 1j)}
    assert sketch_distance(one, one) == (0.0, "")
    assert sketch_distance(one, {"out": one["out"]}) == (math.inf, "more")
    assert sketch_distance({"out": build_sketch(np.full((3,), math.nan))}, {"out": one["out"]})[0] == math.inf


def test_rows_that_depend_on_their_neighbours_are_told_from_those_that_do_not() -> None:
    torch.manual_seed(0)
    rows, others = torch.randn(4, 3), torch.randn(4, 3)
    others[0] = rows[0]
    for module, expected in ((nn.Linear(3, 2), False), (nn.BatchNorm1d(3), True), (nn.LayerNorm(3), False)):
        first, second = ({"out": module(x).detach().numpy()} for x in (rows, others))
        assert row_differs(first, second, 0, 4, 1e-6) == expected


def test_rows_that_were_mixed_are_told_from_those_that_are_normalised_together() -> None:
    z = np.random.default_rng(0).normal(size=(3, 4, 5))  # rows, views, features
    mixed = z.reshape(4, 3, 5).swapaxes(0, 1)
    assert mixed_rows({"z": mixed}, {"z": z}, 1e-9) == "z"
    assert mixed_rows({"z": z}, {"z": z}, 1e-9) == ""
    assert mixed_rows({"z": (z - z.mean(0)) / z.std(0)}, {"z": z}, 1e-9) == ""
    assert mixed_rows({"z": z[:2], "n": np.arange(3)}, {"z": z, "n": np.arange(3)[::-1]}, 1e-9) == ""
