"""A layer that nobody has initialised after `to_empty` is recognised, and no other is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.proof.scripts.start.empty_memory import filled_memory, find_uninitialised


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_to_empty_leaves_is_known_until_somebody_writes_it(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    with filled_memory():
        model.to(dtype).to_empty(device="cpu")
    first, norm, _ = model
    first.reset_parameters()
    norm.reset_parameters()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert find_uninitialised(named) == ["2.weight", "2.bias"]


def test_what_was_not_asked_for_is_left_alone() -> None:
    """`recurse=False` allocates the module's own tensors, not those of its children."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    with filled_memory():
        model.to_empty(device="cpu", recurse=False)
    assert find_uninitialised(dict(model.named_parameters())) == []


def test_torch_is_left_as_it_was() -> None:
    before = nn.Module.to_empty
    with filled_memory():
        assert nn.Module.to_empty is not before
    assert nn.Module.to_empty is before
    assert find_uninitialised({"w": torch.ones(2), "n": torch.ones(2, dtype=torch.int64), "e": torch.ones(0)}) == []
