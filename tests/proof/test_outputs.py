"""Sketches of what a forward pass returns, and what two passes tell of a model."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unisono.proof.recording.output_digest import distance, row_differs, sketch, tensors


def test_tensors_are_named_and_parameters_are_none() -> None:
    found = dict(tensors({"a": torch.ones(2), "b": (torch.ones(1), 3), "weight": nn.Parameter(torch.ones(1))}))
    assert [*found] == ["['a']", "['b'][0]"]
    assert [name for name, _ in tensors(torch.ones(2))] == ["output"]


@pytest.mark.parametrize("where", [0, 5, 999])
def test_a_difference_anywhere_shows_in_its_size(where: int) -> None:
    one = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    other = one.clone()
    other[where] += 1e-6
    size, name = distance({"out": sketch(other)}, {"out": sketch(one)})
    assert size == pytest.approx(1e-6 / float(one.norm()), rel=1e-3)
    assert name == "out"


def test_a_difference_everywhere_shows_too() -> None:
    one = torch.ones(1000, dtype=torch.float64)
    size, _ = distance({"out": sketch(one + 1e-9)}, {"out": sketch(one)})
    assert 1e-10 < size < 1e-7


def test_equal_passes_have_no_distance_and_missing_tensors_an_infinite_one() -> None:
    one = {"out": sketch(torch.ones(3)), "more": sketch(torch.ones(3) * 1j)}
    assert distance(one, one) == (0.0, "")
    assert distance(one, {"out": one["out"]}) == (math.inf, "more")
    assert distance({"out": sketch(torch.full((3,), math.nan))}, {"out": one["out"]})[0] == math.inf


def test_rows_that_depend_on_their_neighbours_are_told_from_those_that_do_not() -> None:
    torch.manual_seed(0)
    rows, others = torch.randn(4, 3), torch.randn(4, 3)
    others[0] = rows[0]
    for module, expected in ((nn.Linear(3, 2), False), (nn.BatchNorm1d(3), True), (nn.LayerNorm(3), False)):
        assert row_differs(module(rows), module(others), 0, 4, 1e-6) == expected
