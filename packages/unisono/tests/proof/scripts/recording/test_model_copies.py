"""Copies of a model are found by what they are, and told apart by the variables that hold them."""

from __future__ import annotations

import copy

from torch import nn

from unisono.proof.scripts.recording.model_copies import find_copies


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model)


def build() -> nn.Sequential:
    """A model of a body, whose shapes no other test has, and a head."""
    return nn.Sequential(nn.Sequential(nn.Linear(7, 11), nn.Linear(11, 13)), nn.Linear(13, 2))


def test_a_copy_of_the_model_or_of_a_part_is_found_and_a_layer_like_one_of_it_is_not() -> None:
    model = build()
    head = nn.Linear(13, 2)
    assert find_copies(model) == {}
    target = copy.deepcopy(model[0])
    found = find_copies(model)
    assert [id(one) for one in found.values()] == [id(one) for one in target.parameters()]
    assert head.weight is not found.get("weight")


def test_several_copies_are_told_apart_by_their_variables() -> None:
    model = build()
    average, teacher = Average(model), copy.deepcopy(model[0])
    found = find_copies(model)
    assert {name.partition(".")[0] for name in found} == {"average", "teacher"}
    assert found["average.1.bias"] is average.module[1].bias
    assert found["teacher.0.bias"] is teacher[0].bias


def test_copies_that_no_variable_of_their_own_holds_are_not_compared() -> None:
    model = build()
    copies = [copy.deepcopy(model), copy.deepcopy(model)]
    assert len(copies) == 2
    assert find_copies(model) == {}
