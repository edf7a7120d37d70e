"""Checks of a task's functions before the first step: random draws, padding rows, fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.interpreters.partial_eval as partial_eval
import jax.numpy as jnp
import numpy as np

from unisono.engines import rules
from unisono.engines.jax.batches import DeviceBatch
from unisono.engines.jax.forward import Forward, Inputs
from unisono.engines.jax.numerics import precision
from unisono.runtime.errors import ConfigError
from unisono.task import Context, GlobalBatch

_LAST_ROWS = 8  # rows that are marked as padding, one after the other
_RELATIVE_TOLERANCE = 1e-3  # relative; a row too many in a micro-batch of less than a thousand is more


def draws_random_numbers(forward: Forward, one: DeviceBatch, inputs: Inputs) -> bool:
    """Whether a micro-batch's result depends on its key; then the micro-batch is part of the mathematics."""

    def leaves(key: Any, *given: Any) -> Any:
        return jax.tree.leaves(_outputs(forward, *given, key=key)[0])

    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    try:
        jaxpr = jax.make_jaxpr(leaves)(key, *_shapes(forward, one, inputs)).jaxpr
    except ConfigError:
        raise
    except Exception:  # it is raised again, as a sentence, where the step is compiled
        return True
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return bool(used[0])


def check_double_precision(forward: Forward, one: DeviceBatch, inputs: Inputs) -> None:
    """Refuse, in fp64, a model that uses fewer bits anywhere; see `precision.check_no_downcast`."""
    if forward.kind != "fp64":
        return

    def compute_loss(arrays: Any, one: DeviceBatch, inputs: Inputs) -> Any:
        outputs, context = _outputs(forward, arrays, one, inputs)
        if not forward.features.has_local_loss:
            return outputs
        return forward.loss(outputs, one.arrays, one.valid, context)[1]

    leaves = jax.make_jaxpr(lambda *given: jax.tree.leaves(compute_loss(*given)))
    jaxpr = leaves(*_shapes(forward, one, inputs))
    precision.check_no_downcast(jaxpr, type(forward.task).__name__)


def check_padding(forward: Forward, one: DeviceBatch, inputs: Inputs) -> None:
    """Refuse a loss that counts padding rows of a short batch.

    It is computed twice on the same synthetic outputs: without the last row, and with that row marked as padding. The
    last row may count nothing by itself, so others take its place as well.

    Args:
        forward: for training or for evaluation.
        one: a padded micro-batch, as NumPy arrays.
        inputs: of the first step.

    Raises:
        ConfigError: naming the term or metric.
    """
    rows = len(one.valid)
    if rows < 2 or forward.features.cross_sample == "whole":
        return

    if (outputs := _synthetic_outputs(forward, one, inputs)) is None:
        return  # nothing here can be cut by row; a short micro-batch is refused when it comes

    def sums(count: int, everything: Any) -> Any:
        """The sums of all rows but the last, of which there are so many."""
        cut: tuple[Any, Any] = jax.tree.map(lambda array: jnp.asarray(array[:count]), everything)
        micro = one.with_rows(cut[1], jnp.arange(count) < rows - 1)
        real = jax.tree.map(lambda array: array[: rows - 1], cut)
        everyone = None
        if forward.features.cross_sample == "rows":
            everyone = GlobalBatch(real[0], forward.features.shared_arrays(real[1]), 0)
        context = forward.context(
            micro, inputs, carry=forward.features.initial_carry(micro.arrays), global_batch=everyone
        )  # fmt: skip
        if forward.features.totals is not None and forward.training:
            context = replace(context, totals=forward.features.compute_totals(*cut, context))
        return forward.loss(*cut, micro.valid, context)[1], context.totals

    whole = outputs, one.arrays
    jax.eval_shape(lambda: sums(rows, whole))
    if not (forward.masked_by_task or forward.features.totals is not None):
        return
    program, pairs = jax.jit(sums, static_argnums=0), list[Any]()
    for shift in range(min(rows, _LAST_ROWS)):
        rolled = jax.tree.map(lambda array, by=shift: np.roll(array, by, axis=0), whole)
        right, wrong = (jax.tree_util.tree_leaves_with_path(program(count, rolled)) for count in (rows - 1, rows))
        pairs += zip(right, wrong, strict=True)
    for (path, expected), (_, found) in pairs:
        if not np.allclose(expected, found, rtol=_RELATIVE_TOLERANCE, atol=1e-30, equal_nan=True):
            kind, name = ("totals", path[-1].key) if path[0].idx else (path[1].key, path[2].key)
            what = {"sums": "loss() returns a term", "metrics": "loss() returns a metric", "totals": "totals()"}[kind]
            raise ConfigError(
                f"{type(forward.task).__name__}: {what} ('{name}') that counts padding rows of a short batch (of "
                f"{rows} rows {rows - 1} were real, and it is {np.max(found):.6g} instead of {np.max(expected):.6g}). "
                "Give one number per row, or leave out rows where context.valid is False"
            )


def check_sum(forward: Forward, one: DeviceBatch, inputs: Inputs) -> None:
    """Refuse a loss that is not a sum, of a task that leaves the counting of rows to us; see `rules.check_sum`.

    It is computed on the same synthetic outputs, once and with every row twice. Arguments as for `check_padding`.
    """
    task = forward.task
    if (
        not rules.counts_by_default(forward.names.terms)
        or not forward.features.has_local_loss
        or (outputs := _synthetic_outputs(forward, one, inputs)) is None
    ):
        return

    def sums(everything: Any) -> Any:
        outputs, arrays = jax.tree.map(jnp.asarray, everything)
        micro = one.with_rows(arrays, jnp.ones(len(jax.tree.leaves(arrays)[0]), bool))
        context = forward.context(micro, inputs, carry=forward.features.initial_carry(arrays))
        return forward.loss(outputs, arrays, micro.valid, context)[1]["sums"]

    whole, program = (outputs, one.arrays), jax.jit(sums)

    def sums_of(rows: Sequence[int]) -> Any:
        return program(jax.tree.map(lambda array: np.asarray(array)[list(rows)], whole))

    first = jax.process_index() == 0
    rules.check_sum(task, program(whole), sums_of, sums_of, len(one.valid), warns=first)  # outputs are random ones


def _synthetic_outputs(forward: Forward, one: DeviceBatch, inputs: Inputs) -> Any:
    """Numbers in the shape of the task's outputs for a micro-batch; None if not all arrays have a row axis."""
    rows = len(one.valid)
    described = jax.eval_shape(lambda *given: _outputs(forward, *given)[0], *_shapes(forward, one, inputs))
    leaves = [*jax.tree.leaves(described), *jax.tree.leaves(one.arrays)]
    if any(not leaf.shape or leaf.shape[0] != rows for leaf in leaves):
        return None
    generator = np.random.default_rng(0)

    def draw(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        return generator.uniform(0.1, 0.9, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(draw, described)


def _outputs(forward: Forward, arrays: Any, one: DeviceBatch, inputs: Inputs, **changes: Any) -> tuple[Any, Context]:
    """The task's outputs for a micro-batch with these arrays of the model, and the context in which it gave them."""
    context = forward.context(one, inputs, carry=forward.features.initial_carry(one.arrays))
    context = replace(context, **changes)
    return forward.task.outputs(forward.structure.model(arrays), one.arrays, context), context


def _shapes(forward: Forward, one: DeviceBatch, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Shapes and dtypes of the model's arrays as they compute, of a micro-batch and of inputs."""
    compute = precision.COMPUTE[forward.kind]
    arrays = {
        name: jax.ShapeDtypeStruct(shape.shape, compute if jnp.issubdtype(shape.dtype, jnp.floating) else shape.dtype)
        for name, shape in forward.structure.shapes.items()
    }
    like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(np.shape(array), np.asarray(array).dtype), (one, inputs))
    return arrays, *like
