"""The step of the puzzles in JAX as a program: dtypes and shapes of its products, what it returns, and its size."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed: pip install 'unisono[jax]'")

import jax

from packages.unisono.tests.jax_programs import Program, lower_step, size_in_bytes
from packages.unisono.tests.jax_runs import layout
from packages.unisono.tests.runs import configuration
from recipes.puzzles.tests import test_task as of_torch
from unisono_puzzles.jax_task import Puzzles
from unisono_puzzles.model.shape import places

ROWS = 8
_JOINED = r"stablehlo\.concatenate .* -> tensor<([\dx]+)x\w+>"
MODEL = {"prefix": 3, "embedding": 48, "width": 16}  # 4×4 cells and a prefix of 3 are 19 places


def step(precision: str = "bf16", **model: Any) -> tuple[Puzzles, Program]:
    like = of_torch.task({**MODEL, **model})
    task = Puzzles(like.config, model=like.model_config, data=like.data_config)
    task.setup()
    config = configuration(
        train={"steps": 4, "global_batch": ROWS, "precision": precision}, layout=layout(micro_batch=ROWS),
        observe={"progress": False}, optim={"kind": "adam_atan2", "lr": 1e-3, "groups": of_torch.SIGN},
        ema={"decay": 0.9},
    )  # fmt: skip
    return task, lower_step(task, config)


@pytest.fixture(scope="module")
def published() -> tuple[Puzzles, Program]:
    """The mixer of the published model, in the precision in which it trains."""
    return step()


@pytest.mark.slow
def test_in_16_bits_no_product_is_wider_and_none_has_odd_places(published: tuple[Puzzles, Program]) -> None:
    """Forward and backward; 19 places would fall off the fast kernels, 24 do not."""
    task, program = published
    length = places(task.kinds["sudoku"], task.model_config)
    found = program.products
    assert length == 19 and len(found) > 30
    assert {dtype for product in found for dtype in product.dtypes} == {"bf16"}
    large = [product for product in found if min(map(np.prod, product.shapes)) >= ROWS * 16]
    over_places = [product for product in found if any(24 in shape for shape in product.shapes)]
    assert len(large) > 20 and len(over_places) > 20
    assert not any(length in shape for product in found for shape in product.shapes)
    # What is left are the head of the answers and that of the Q-values, whose results have 6 and 2 columns.
    odd = [product for product in found if any(size % 8 for shape in product.shapes for size in shape)]
    assert all(any(size in (2, 6) for size in product.shapes[0] + product.shapes[1]) for product in odd)
    assert len(odd) == 6, "a product forward and two backward, for each of two heads"


@pytest.mark.slow
def test_a_step_returns_its_state_and_one_vector_and_nothing_else(published: tuple[Puzzles, Program]) -> None:
    """Nobody asked for logits or gradients; rows keep their puzzle, two hidden states and three numbers."""
    task, program = published
    before, *_ = program.given
    after, outcome = program.returned
    shapes = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (before, after))
    assert next(shapes) == next(shapes)
    cells, length = task.kinds["sudoku"].format.length, places(task.kinds["sudoku"], task.model_config)
    states = 2 * length * 16 * 4  # in fp32, also in a run in bf16: docs/log.md says what that costs
    assert size_in_bytes(after.carry) == ROWS * (states + 2 * cells + 4 + 4 + 4 + 1)
    assert outcome.ndim == 1 and size_in_bytes(outcome) < 4 * (3 + len(before.parameters) + 32)
    state, *_ = program.lowered.args_info[0]
    assert all(leaf.donated for leaf in jax.tree.leaves(state))


@pytest.mark.slow
def test_cycles_without_a_gradient_make_no_larger_program(published: tuple[Puzzles, Program]) -> None:
    """They are a loop; only the updates that have a gradient stand one by one."""
    _, program = published
    _, more = step(h_cycles=4)
    assert more.operations == program.operations
    assert len(more.products) == len(program.products)
    updates = [len(step(l_cycles=count)[1].products) for count in (3, 4)]
    assert updates[0] - len(program.products) == updates[1] - updates[0]


@pytest.mark.slow
def test_nothing_that_a_gradient_needs_is_copied_into_a_loop_or_put_together(
    published: tuple[Puzzles, Program],
) -> None:
    """XLA for GPUs made passes over memory of both: 107 and 73 of 386 GB of the published step (docs/log.md)."""
    task, program = published
    text = program.lowered.as_text()
    assert "stablehlo.while" in text and "stablehlo.dynamic_update_slice" not in text
    joined = [tuple(map(int, sides.split("x"))) for sides in re.findall(_JOINED, text)]
    shown = ROWS, places(task.kinds["sudoku"], task.model_config), task.model_config.width
    assert {shape for shape in joined if shape[0] == ROWS and len(shape) == 3} == {shown}, "the prefix and the cells"


@pytest.mark.slow
def test_the_same_step_in_fp32_has_no_product_of_16_bits() -> None:
    """The check of dtypes sees more than one."""
    found = step("fp32")[1].products
    assert {dtype for product in found for dtype in product.dtypes} == {"f32"}
    assert any(19 in shape for product in found for shape in product.shapes), "places are padded in 16 bits alone"
