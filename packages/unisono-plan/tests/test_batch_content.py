"""Shapes that depend on content, in a trace: those of the micro-batch that is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from unisono_plan.batch_content import BatchContent

from .conftest import trace

NUMBERS = torch.tensor([[3, 1, 3], [0, 1, 7]])
TRUE = (NUMBERS > 1).sum(1).tolist()  # in each row


@pytest.fixture
def content() -> Iterator[BatchContent]:
    with FakeTensorMode() as mode, BatchContent(mode) as content:
        yield content


def parameter(*shape: int) -> Tensor:
    """Without content, as all parameters are in a trace."""
    return torch.empty(*shape, requires_grad=True)


def test_distinct_numbers_of_a_batch_are_as_many_as_there_are(content: BatchContent) -> None:
    numbers = content.fake(NUMBERS)
    found, places = torch.unique(numbers.clamp(min=1), return_inverse=True)
    vectors = torch.nn.functional.embedding(found, parameter(9, 5))
    assert (found.shape, places.shape, vectors.shape) == ((3,), (2, 3), (3, 5))


def test_masked_activations_are_as_many_as_the_mask_is_true_and_so_is_their_gradient(content: BatchContent) -> None:
    mask, hidden = content.fake(NUMBERS) > 1, parameter(2, 3, 4)
    chosen = hidden[mask] * 2
    assert chosen.shape == (sum(TRUE), 4)
    assert hidden.masked_select(mask[..., None].expand(2, 3, 4)).shape == (4 * sum(TRUE),)
    chosen.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape


def test_numbers_that_follow_from_a_batch_can_be_read(content: BatchContent) -> None:
    mask = content.fake(NUMBERS) > 1
    assert mask.sum(1).tolist() == TRUE
    mask[0, 1] = True  # written in place, of which the number is known
    assert mask.sum(1).tolist() == [TRUE[0] + 1, TRUE[1]]
    assert (torch.arange(3) * 2).tolist() == [0, 2, 4]


def test_what_a_parameter_decides_has_no_content_and_neither_has_what_it_is_written_to(content: BatchContent) -> None:
    hidden, numbers = parameter(2, 3).detach(), content.fake(NUMBERS)
    with pytest.raises(DynamicOutputShapeException):
        hidden[hidden > 0]
    view = numbers.view(-1)
    numbers.copy_(hidden)
    with pytest.raises(DynamicOutputShapeException):
        torch.unique(view)
    with pytest.raises(DynamicOutputShapeException):
        torch.unique(torch.rand(4))  # drawn


def test_nothing_large_is_computed_without_need(content: BatchContent) -> None:
    numbers = content.fake(torch.zeros(1, dtype=torch.int64))
    wide = numbers.expand(1 << 40) + 1  # 8 TB
    assert wide.shape == (1 << 40,)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("recipe", ["microbiome", "speech"])
def test_recipes_whose_shapes_follow_from_content_are_traced(recipe: str, world: int) -> None:
    pytest.importorskip(f"unisono_{recipe}", reason=f"the recipe {recipe} is not installed")
    traced = trace(recipe=recipe, rows=4, world_size=world)
    recording = traced.recording
    assert recording.peak["parameters"] >= 4 * traced.parameters // world
    assert recording.work["backward"].flops > recording.work["forward"].flops > 1e6
    assert bool(recording.collectives) == (world > 1)
