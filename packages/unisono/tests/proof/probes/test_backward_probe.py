"""What the user has put on the way of gradients, with its line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from packages.unisono.tests.tasks import LinearTask
from unisono import Loss
from unisono.proof.probes.backward_probe import find_on_the_way


class Reversed(torch.autograd.Function):
    """The gradient with the other sign."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -gradient


def twice(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def again(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad *= 2


def test_hooks_backward_functions_and_frequencies_are_found_with_their_lines() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(3, 2, scale_grad_by_freq=True), "head": nn.Linear(2, 1)})
    head = model["head"]
    assert isinstance(head, nn.Linear)
    head.weight.register_hook(twice)
    head.bias.register_post_accumulate_grad_hook(again)
    total = Reversed.apply(head(model["words"](torch.tensor([0, 1])))).sum()  # type: ignore[no-untyped-call]
    found = find_on_the_way(model, Loss({"a": total, "b": torch.zeros(())}))
    file = "packages/unisono/tests/proof/probes/test_backward_probe.py"
    lines = [one.__code__.co_firstlineno for one in (twice, again, Reversed.backward)]
    assert [one.replace(file, "task.py") for one in found] == [
        "'words', an Embedding with scale_grad_by_freq=True",
        f"the hook of 'head.weight' (task.py:{lines[0]})",
        f"the hook of 'head.bias' (task.py:{lines[1]})",
        f"Reversed.backward (task.py:{lines[2]})",
    ]


def test_a_plain_model_has_nothing_on_the_way() -> None:
    model = LinearTask().build()
    assert find_on_the_way(model, Loss({"a": sum(p.sum() for p in model.parameters())})) == []  # type: ignore[dict-item]
