"""Copies of a model are found by what they are, and told apart by the variables that hold them."""

from __future__ import annotations

import copy

import torch
from torch import nn

from unisono.proof.scripts.recording.model_copies import ModelCopies, find_copies


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


def change(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


def test_what_looks_like_a_copy_and_nobody_changes_is_none() -> None:
    """As the layer that a stack was copied from, and stays, or another network of the same shapes."""
    model = build()
    template = copy.deepcopy(model[0])
    copies = ModelCopies(lambda value: [value])
    for step in range(3):
        change(model)
        assert copies.find(model, step) == {}
    change(template)
    assert [id(one) for one in copies.find(model, 3).values()] == [id(one) for one in template.parameters()]


def test_copies_that_are_changed_or_made_after_the_first_update_are_compared_with_the_second() -> None:
    model = build()
    average = Average(model)
    copies = ModelCopies(lambda value: [value])
    assert copies.find(model, 0) == {}
    change(average.module)
    teacher = copy.deepcopy(model[0])
    found = copies.find(model, 1)
    assert found["average.1.bias"] is average.module[1].bias
    assert {name.partition(".")[0] for name in found} == {"average", "teacher"}
    assert found["teacher.0.bias"] is teacher[0].bias


def test_a_copy_that_one_rank_alone_changes_is_compared_on_all() -> None:
    model = build()
    average = copy.deepcopy(model)
    copies = ModelCopies(lambda value: [value, ["0.0.bias"]])
    copies.find(model, 0)
    assert list(copies.find(model, 1)) == ["0.0.bias"]
    assert average[0][0].bias is copies.find(model, 2)["0.0.bias"]
