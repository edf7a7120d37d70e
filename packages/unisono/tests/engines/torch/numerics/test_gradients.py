"""The whole gradient as one thing: its norm, its clipping, who watches it, and the order in which it is summed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.tasks import LinearTask
from unisono.config.schema.layout import Layout
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.gradients import OrderedSum, tree_additions
from unisono.engines.torch.parallel import wrap
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Context

WIDE = torch.float64


def some(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in [(7, 3), (5,), (), (2,)]
    ]


def vector_norm(parts: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.cat([part.reshape(-1).double() for part in parts])))


# the norm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-15), (torch.float32, 1e-6)])
def test_the_squared_norm_is_that_of_all_gradients_as_one_vector(dtype: torch.dtype, rounding: float) -> None:
    parts = some(dtype)
    squares = gradients.squared_norm(parts, WIDE)
    assert (squares.dtype, squares.dim()) == (WIDE, 0)
    assert math.sqrt(squares) == pytest.approx(vector_norm(parts), rel=rounding)
    assert torch.equal(gradients.squared_norm([torch.zeros(0, 4), *parts, torch.zeros(0)], WIDE), squares)


@pytest.mark.parametrize(
    ("parts", "squares"), [([], 0.0), ([torch.zeros(0, 3)], 0.0), ([1e4, 1.0], 1e8 + 1), ([1e30], 1e60)]
)
def test_squares_are_added_in_the_wide_dtype_and_no_element_adds_nothing(parts: list[Any], squares: float) -> None:
    found = gradients.squared_norm([torch.as_tensor(part, dtype=torch.float32) for part in parts], WIDE)
    assert (found.dtype, float(found)) == (WIDE, pytest.approx(squares))


def test_the_norm_of_a_large_tensor_is_that_of_its_shards() -> None:
    """In fp32 it would be 1e-5 off, and every way of cutting it would give another norm to clip by."""
    large = torch.randn(4_000_000, generator=torch.Generator().manual_seed(5))
    whole = gradients.squared_norm([large], WIDE)
    assert float(whole) == pytest.approx(float(large.double().square().sum()), rel=1e-12)
    assert float(gradients.squared_norm(large.chunk(3), WIDE)) == pytest.approx(float(whole), rel=1e-12)


def test_the_norm_of_complex_gradients_is_that_of_their_parts() -> None:
    parts = torch.view_as_complex(torch.randn(7, 2, generator=torch.Generator().manual_seed(5)))
    assert float(gradients.squared_norm([parts], WIDE)) == pytest.approx(float(parts.abs().double().square().sum()))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", range(4))
def test_one_element_that_is_not_finite_makes_the_norm_not_finite(value: float, where: int) -> None:
    parts = some()
    parts[where].view(-1)[-1] = value
    assert not math.isfinite(gradients.squared_norm(parts, WIDE))


# clipping -------------------------------------------------------------------------------------------------------------


def test_gradients_within_the_limit_stay_and_those_beyond_it_are_scaled_to_it_as_one() -> None:
    before = some(torch.float64)
    norm = vector_norm(before)
    for largest in (None, norm, 1e3, 0.01, 1.0):
        parts = some(torch.float64)
        gradients.clip_gradients(parts, norm, largest)
        if largest is None or largest >= norm:
            assert all(torch.equal(part, was) for part, was in zip(parts, before, strict=True))
            continue
        assert vector_norm(parts) == pytest.approx(largest, rel=1e-6)
        assert vector_norm(parts) <= largest
        for part, was in zip(parts, before, strict=True):
            torch.testing.assert_close(part * norm / vector_norm(parts), was, rtol=1e-12, atol=0)
    gradients.clip_gradients([], 5.0, 1.0)  # a process without gradients has nothing to clip


# watching -------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = (nn.Linear(3, 1) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


class Inner(nn.Module):
    """A step module in miniature."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Branches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().sum()


def test_gradients_are_seen_by_name_as_backward_makes_them_and_not_what_was_there_before() -> None:
    step = Inner()
    seen: dict[str, torch.Tensor] = {}
    step.model.used.bias.grad = torch.full((1,), 100.0)
    with gradients.local_gradients(step, lambda name, gradient: seen.__setitem__(name, gradient.clone())):
        step(torch.randn(4, 3)).backward()
    assert seen.keys() == {"model.used.weight", "model.used.bias"}
    assert torch.equal(seen["model.used.weight"], step.model.used.weight.grad)
    assert torch.equal(seen["model.used.bias"] + 100, step.model.used.bias.grad)
    with gradients.local_gradients(step, lambda name, _: pytest.fail(name)), torch.no_grad():
        step(torch.ones(1, 3))


def test_nobody_watches_afterwards_even_after_an_error() -> None:
    step, seen = Inner(), []
    with pytest.raises(ZeroDivisionError), gradients.local_gradients(step, lambda name, _: seen.append(name)):
        step(torch.ones(1, 3)).backward()
        raise ZeroDivisionError
    before = len(seen)
    step(torch.ones(1, 3)).backward()
    assert len(seen) == before == 2


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(rank: int) -> dict[str, torch.Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    return {"x": x, "y": x.sum(1, keepdim=True)}


def gradients_of(step: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    """What backward is seen to make of a rank's batch."""
    seen: dict[str, torch.Tensor] = {}
    with gradients.local_gradients(
        getattr(step, "module", step), lambda name, gradient: seen.__setitem__(name, gradient.detach().clone())
    ):
        total, _ = step(batch(rank), Context(0, training=True), {"square": torch.ones(())})
        total.backward()
    return seen


def watched(place: ProcessInfo, group: Communicator) -> dict[str, float]:
    """How far what is seen in each wrapper is from what a process alone sees of the same batch."""
    result = {}
    for strategy in ("ddp", "fsdp"):
        layout = Layout.model_validate({"strategy": strategy, "world_size": 2})
        torch.manual_seed(0)
        reference = gradients_of(wrap.StepModule(LinearTask(), Blocks()), place.rank)
        torch.manual_seed(0)
        step = wrap.wrap(wrap.StepModule(LinearTask(), Blocks()), layout, "fp32", torch.device("cpu"), 2, 60.0)
        seen = gradients_of(step, place.rank)
        assert seen.keys() == reference.keys()
        result[strategy] = max(float((seen[name] - reference[name]).abs().max()) for name in reference)
    torch.manual_seed(0)
    other = gradients_of(wrap.StepModule(LinearTask(), Blocks()), 1 - place.rank)
    result["other"] = max(float((other[name] - reference[name]).abs().max()) for name in reference)
    return result


def test_what_is_seen_is_local_whatever_the_wrapper_reduces() -> None:
    for result in processes.run(watched, 2):
        assert result["other"] > 0.1, "the ranks have different gradients, else this would say nothing"
        assert result["ddp"] < 1e-6
        assert result["fsdp"] < 1e-6


# the order of sums ----------------------------------------------------------------------------------------------------

Tree = Any  # a leaf's number, or a pair of trees


def tree(leaves: list[Tree]) -> Tree:
    """The pairs that are to be added: halved while the number is even, from left to right below that."""
    if len(leaves) % 2 == 0:
        half = len(leaves) // 2
        return tree(leaves[:half]), tree(leaves[half:])
    total = leaves[0]
    for leaf in leaves[1:]:
        total = (total, leaf)
    return total


def stacked(leaves: list[Tree]) -> Tree:
    """The pairs that a stack adds when it is told how many additions follow each leaf."""
    stack: list[Tree] = []
    for leaf, adds in zip(leaves, tree_additions(len(leaves)), strict=True):
        for _ in range(adds):
            leaf = (stack.pop(), leaf)
        stack.append(leaf)
    (total,) = stack
    return total


def over(world: int, leaves: int) -> Tree:
    """The pairs of so many processes, each with its contiguous share."""
    share = leaves // world
    return stacked([stacked(list(range(rank * share, (rank + 1) * share))) for rank in range(world)])


def summed(values: list[torch.Tensor], pairs: Tree) -> torch.Tensor:
    return values[pairs] if isinstance(pairs, int) else summed(values, pairs[0]) + summed(values, pairs[1])


@pytest.mark.parametrize("leaves", [*range(1, 17), 24, 40])
def test_a_stack_adds_the_pairs_of_the_tree(leaves: int) -> None:
    assert stacked(list(range(leaves))) == tree(list(range(leaves)))


@pytest.mark.parametrize(
    ("leaves", "world"), [(2, 2), (4, 2), (4, 4), (6, 2), (8, 2), (8, 4), (12, 2), (12, 4), (20, 4), (24, 8), (40, 8)]
)
def test_powers_of_two_of_processes_add_the_pairs_of_one_and_three_add_others(leaves: int, world: int) -> None:
    assert over(world, leaves) == over(1, leaves)
    assert over(3, 12) != over(1, 12)
    assert stacked(list(range(8))) == (((0, 1), (2, 3)), ((4, 5), (6, 7)))


def micro_gradients(number: int) -> list[torch.Tensor]:
    """Gradients of so different magnitudes that every order of summation has other bits."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(50, generator=generator) * 10 ** (step % 5) for step in range(number)]


def ordered(values: list[torch.Tensor], missing: int = 0) -> torch.Tensor | None:
    """What one process's sum comes to after all its passes."""
    parameter = nn.Parameter(torch.zeros(50))
    sums = OrderedSum([parameter], missing + len(values), 1)
    sums.begin(len(values))
    for number, value in enumerate(values):
        parameter.grad = value.clone()
        sums.end_pass()
        assert (parameter.grad is None) == (number < len(values) - 1)
    return parameter.grad


@pytest.mark.parametrize("passes", [1, 3, 4, 6, 8, 12])
def test_gradients_are_summed_in_the_order_of_the_tree(passes: int) -> None:
    values = micro_gradients(passes)
    total = ordered(values)
    assert total is not None
    assert torch.equal(total, summed(values, tree(list(range(passes)))))


def test_the_sums_of_processes_added_in_rank_order_are_the_sum_of_one_and_another_order_has_other_bits() -> None:
    values = micro_gradients(12)
    alone = ordered(values)
    assert alone is not None
    for world in (2, 4):
        share = len(values) // world
        parts = [ordered(values[rank * share : (rank + 1) * share]) for rank in range(world)]
        total = ordered([part for part in parts if part is not None])
        assert total is not None
        assert torch.equal(total, alone)
    assert not torch.equal(alone, torch.stack(values).sum(0))
    assert not torch.equal(alone, summed(values, over(3, 12)))


@pytest.mark.parametrize("first", [1, 2, 3])
def test_passes_before_the_first_count_as_made_and_as_having_had_no_gradient(first: int) -> None:
    values = micro_gradients(4)[first:]
    total = ordered(values, missing=first)
    assert total is not None
    torch.testing.assert_close(total, torch.stack(values).sum(0))


def test_a_parameter_without_a_gradient_in_some_passes_has_the_sum_of_the_others_in_every_step() -> None:
    sometimes, never = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    sums = OrderedSum([sometimes, never], 4, 1)
    for factor in (100.0, 1.0):  # a new step forgets the previous one
        sums.begin(4)
        for value in (None, 1.0, 2.0, None):
            sometimes.grad = None if value is None else torch.tensor([factor * value])
            sums.end_pass()
    assert sometimes.grad is not None
    assert sometimes.grad.tolist() == [3.0]
    assert never.grad is None, "no zero, which an optimizer would decay"
