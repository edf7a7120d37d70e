"""The step of each objective as a program: products in the precision of the run, as many for any number of blocks."""

from __future__ import annotations

from functools import cache

import jax
import pytest

from packages.unisono.tests.jax_programs import Program, lower_step, size_in_bytes
from packages.unisono.tests.jax_runs import configuration, layout
from recipes.birdsong.tests.small import task

# Products of losses and of what is reported, which no precision of a run makes narrower: of embeddings (rows, 16) with
# each other, and of LeJEPA's projections on directions and on points of a grid.
SPREAD = ((8, 16), (16, 8), (8, 8))
OF_LOSSES = {
    "supervised": [SPREAD],
    "pixio": [SPREAD],
    "lejepa": [
        SPREAD,
        ((8, 3, 5), (5, 16), (8, 3, 16)),
        ((3, 16, 17), (17,), (3, 16)),
        ((3, 16), (17,), (3, 16, 17)),
        ((8, 3, 16), (5, 16), (8, 3, 5)),
    ],
}


@cache
def step(objective: str, precision: str = "bf16", depth: int = 2) -> Program:
    train = {"steps": 4, "global_batch": 8, "precision": precision}
    made = task(objective, model={"depth": depth})
    return lower_step(made, configuration(layout=layout(micro_batch=8), train=train))


@pytest.mark.slow
@pytest.mark.parametrize("objective", OF_LOSSES)
def test_in_16_bits_no_product_of_a_model_has_a_wider_operand(objective: str) -> None:
    """Forward and backward. Attention's scores come out in fp32, from operands of 16 bits."""
    found = step(objective).products
    wide = [product.shapes for product in found if "f32" in product.dtypes[:2]]
    assert sorted(wide) == sorted(OF_LOSSES[objective])
    assert len(found) > 30 and {dtype for product in found for dtype in product.dtypes} == {"bf16", "f32"}


@pytest.mark.slow
def test_the_same_step_in_fp32_has_no_product_of_16_bits() -> None:
    """The check of dtypes sees more than one."""
    assert {dtype for product in step("supervised", "fp32").products for dtype in product.dtypes} == {"f32"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", OF_LOSSES)
def test_a_step_returns_its_state_and_one_vector_and_nothing_else(objective: str) -> None:
    program = step(objective)
    before, (after, outcome) = program.given[0], program.returned
    shapes = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (before, after))
    assert next(shapes) == next(shapes)
    assert outcome.ndim == 1 and size_in_bytes(outcome) < 4 * (3 + len(before.parameters) + 64)
    state, *_ = program.lowered.args_info[0]
    assert all(leaf.donated for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_more_blocks_make_no_more_products() -> None:
    """They are a loop; what grows is one small update for each of their arrays."""
    program, deeper = step("supervised"), step("supervised", depth=6)
    assert len(deeper.products) == len(program.products)
    assert size_in_bytes(deeper.given[0]) > 2 * size_in_bytes(program.given[0])
