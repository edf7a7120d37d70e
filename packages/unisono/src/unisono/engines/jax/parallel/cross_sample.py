"""Losses across samples: all outputs on every device, and the gradient of the loss with respect to its own rows.

The loss is computed on outputs that are cut off from the model, and its gradient in them drives the backward pass of
each micro-batch (gradient caching: Gao et al., 2021), as in the torch engine. With "rows" the gather is differentiated,
whose backward adds up over devices what each has found; with "whole" every device computes the same, and keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from unisono.engines.jax.batches import DeviceBatch
from unisono.engines.jax.forward import Forward, Inputs, Scales
from unisono.engines.jax.parallel import mesh
from unisono.runtime.errors import ConfigError
from unisono.task import GlobalBatch


@dataclass(frozen=True)
class CrossSampleResult:
    """The result of a loss across samples on one device.

    Attributes:
        reports: of each micro-batch, (passes, numbers).
        gradients: of the loss in the outputs, (passes, rows, …); None in evaluation, and for integers.
        carry: what rows leave for the next step, (passes, rows, …); None without.
    """

    reports: jax.Array
    gradients: Any
    carry: Any


class JaxCrossSampleLoss:
    """The loss of one global batch; inside of `Grid.per_device`.

    Args:
        forward: the functions of the task.
        batch: this device's micro-batches.
        inputs: of the step.
        scales: of the terms.
        rows: real rows of the global batch; it is compiled for this number, so that nobody sees rows that pad.
        totals: of the global batch, where the task asks for them.
        carry: of the rows of each micro-batch, where they have a state.
    """

    def __init__(
        self, forward: Forward, batch: DeviceBatch, inputs: Inputs, scales: Scales, rows: int, totals: Any, carry: Any
    ) -> None:
        self._forward, self._batch, self._inputs, self._scales = forward, batch, inputs, scales
        self._totals, self._carry = totals, carry
        self._rows = _GlobalRows(batch, rows)
        shared = jax.vmap(forward.features.shared_arrays)(batch.arrays)
        self._shared = jax.tree.map(self._rows.gather, shared)

    def compute_loss(self, outputs: Any) -> CrossSampleResult:
        """Compute the loss, and in training its gradient in the outputs.

        Args:
            outputs: of this device's micro-batches, (passes, rows, …).

        Raises:
            ConfigError: for outputs that cannot be put side by side.
        """
        self._check(outputs)
        whole = self._forward.features.cross_sample == "whole"
        loss = self._whole if whole else self._by_rows
        if whole:  # nothing is added up over devices, so the gather is no part of what is differentiated
            outputs = jax.tree.map(self._rows.gather_padded, outputs)
        floats, others = eqx.partition(outputs, eqx.is_inexact_array)
        if not self._forward.training:
            _, (reports, _) = loss(outputs)
            return CrossSampleResult(reports, None, None)
        gradients, (reports, carry) = jax.grad(lambda f: loss(eqx.combine(f, others)), has_aux=True)(floats)
        return CrossSampleResult(
            reports, jax.tree.map(self._rows.select_local, gradients) if whole else gradients, carry
        )

    def _by_rows(self, outputs: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """This device's share of the loss: its rows against everyone's, micro-batch by micro-batch."""
        forward, every = self._forward, jax.tree.map(self._rows.gather, outputs)

        def one(total: jax.Array, given: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            own, micro, first, kept = given
            everyone = GlobalBatch(every, self._shared, first)
            context = forward.context(micro, self._inputs, totals=self._totals, carry=kept, global_batch=everyone)
            loss, sums = forward.loss(own, micro.arrays, micro.valid, context)
            return total + forward.objective(sums, self._scales), (forward.report(sums, micro), loss.carry)

        zero = jnp.zeros((), self._batch.counts.dtype)
        return jax.lax.scan(one, zero, (outputs, self._batch, self._rows.first_rows, self._carry))

    def _whole(self, gathered: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        """The loss of all rows together, the same on every device; its sums are counted once, with the first rows."""
        forward, first = self._forward, jax.tree.map(lambda array: array[0], self._batch)
        valid = jnp.ones(self._rows.rows, bool)
        context = replace(
            forward.context(first, self._inputs, totals=self._totals),
            key=self._inputs.loss_key(forward.training), valid=valid,
        )  # fmt: skip
        loss, sums = forward.loss(jax.tree.map(self._rows.real, gathered), self._shared, valid, context)
        if loss.carry is not None:
            raise ConfigError(f"{type(forward.task).__name__}: a loss with cross_sample='whole' cannot return a carry")
        nothing = jax.vmap(lambda micro: forward.report(None, micro))(self._batch)
        counted = jnp.where(mesh.device_index() == 0, forward.report(sums, first), nothing[0])
        return forward.objective(sums, self._scales), (nothing.at[0].set(counted), None)

    def _check(self, outputs: Any) -> None:
        passes, rows = self._batch.valid.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            if leaf.shape[:2] != (passes, rows):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ConfigError(
                    f"{type(self._forward.task).__name__}: the output '{name}' has the shape {leaf.shape[1:]} for "
                    f"{rows} rows; a loss across samples needs outputs whose first axis is the row"
                )


@dataclass(frozen=True)
class _GlobalRows:
    """The rows of the global batch in order, whichever device computed them.

    Attributes:
        batch: this device's micro-batches.
        rows: real ones of the global batch; others are left out.
    """

    batch: DeviceBatch
    rows: int

    def gather_padded(self, array: jax.Array) -> jax.Array:
        """An array (passes, rows, …) of all devices, (rows of the padded global batch, …)."""
        return mesh.all_gather(array.reshape(-1, *array.shape[2:]))

    def real(self, array: jax.Array) -> jax.Array:
        """Of an array of all rows those that are real."""
        if self.rows == len(array):
            return array
        order = jnp.argsort(~self.gather_padded(self.batch.valid), stable=True)[: self.rows]
        return jnp.take(array, order, axis=0)

    def gather(self, array: jax.Array) -> jax.Array:
        """An array (passes, rows, …) of all devices, (real rows of the global batch, …)."""
        return self.real(self.gather_padded(array))

    def select_local(self, array: jax.Array) -> jax.Array:
        """Of an array of all rows those of this device, (passes, rows, …)."""
        shape = self.batch.valid.shape
        mine = jax.lax.dynamic_slice_in_dim(array, mesh.device_index() * shape[0] * shape[1], shape[0] * shape[1])
        return mine.reshape(*shape, *array.shape[1:])

    @property
    def first_rows(self) -> jax.Array:
        """The place of the first row of each micro-batch of this device, (passes,)."""
        counts = mesh.all_gather(self.batch.valid.sum(1, dtype=jnp.int32))
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts)[:-1]])
        passes = self.batch.valid.shape[0]
        return jax.lax.dynamic_slice_in_dim(before, mesh.device_index() * passes, passes)
