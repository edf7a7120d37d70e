"""A copy of the state is of the moment it was asked for, and its memory is used again.

What happens on an accelerator (pinned memory, a stream of its own) is not tested here: there was none.
"""

from __future__ import annotations

import torch

from unisono.checkpoint.staging import Staging
from unisono.state import Shard


def shard(name: str, data: torch.Tensor) -> Shard:
    return Shard(name, tuple(data.shape), (0,) * data.dim(), data, finite=True)


def test_a_copy_is_of_the_moment_it_was_asked_for() -> None:
    weight, staging = torch.arange(6.0), Staging()
    (copy,) = staging.copy([shard("a", weight)])
    weight.add_(1)
    staging.wait()
    assert torch.equal(copy.data, torch.arange(6.0))
    assert (copy.name, copy.shape, copy.offset, copy.finite) == ("a", (6,), (0,), True)


def test_what_is_not_contiguous_or_shares_memory_is_copied_by_its_indices() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    first, second = Staging().copy([shard("a", whole.t()), shard("b", whole[1:])])
    expected = whole.clone()
    whole.zero_()
    assert torch.equal(first.data, expected.t())
    assert torch.equal(second.data, expected[1:])
    assert first.data.is_contiguous()


def test_a_parameter_is_copied_without_its_graph() -> None:
    (copy,) = Staging().copy([shard("a", torch.nn.Parameter(torch.ones(3)))])
    assert not copy.data.requires_grad


def test_memory_is_used_again_while_shapes_stay() -> None:
    staging = Staging()
    places = []
    for step in range(3):
        copies = staging.copy([shard("a", torch.full((5,), float(step))), shard("b", torch.zeros((2, step + 1)))])
        places.append([copy.data.data_ptr() for copy in copies])
        assert torch.equal(copies[0].data, torch.full((5,), float(step)))
        assert copies[1].data.shape == (2, step + 1)
    assert places[0][0] == places[1][0] == places[2][0]
    kept = {tensor.data_ptr() for tensor in staging._kept.values()}
    assert kept == set(places[2]), "memory of another shape is still held"
