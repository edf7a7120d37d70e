"""Programs without updates: evaluation, and the search for non-finite values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from unisono.engines.jax.batches import DeviceBatch
from unisono.engines.jax.forward import Forward, Inputs, Parameters
from unisono.engines.jax.parallel import mesh
from unisono.engines.jax.parallel.cross_sample import JaxCrossSampleLoss

Sharded = Mapping[str, jax.Array]


@dataclass(frozen=True, eq=False)
class EvaluationProgram:
    """The sums of a global batch.

    Attributes:
        forward: the functions of the task, for evaluation.
        rows: real rows of the global batch, for a loss across samples; else 0.
    """

    forward: Forward
    rows: int = 0

    def __call__(self, parameters: Sharded, constants: Sharded, batch: DeviceBatch, inputs: Inputs) -> jax.Array:
        """The reports of its micro-batches, (micro-batches, numbers)."""
        return self.forward.on_devices(self._on_device, parameters, constants, batch, inputs)

    def _on_device(
        self, parameters: Parameters, constants: Parameters, batch: DeviceBatch, inputs: Inputs
    ) -> jax.Array:
        forward = self.forward
        batch = jax.tree.map(lambda array: array[:, 0], batch)
        crosses = forward.features.cross_sample is not None

        def one(_: None, micro: DeviceBatch) -> tuple[None, Any]:
            context = forward.context(micro, inputs, carry=forward.carry(None, micro, inputs))
            outputs = forward.outputs(parameters, constants, micro, context)
            if crosses:
                return None, outputs
            sums = forward.loss(outputs, micro.arrays, micro.valid, context)[1]
            return None, forward.report(sums, micro)

        _, made = jax.lax.scan(one, None, batch)
        if crosses:
            carry = jax.vmap(lambda micro: forward.carry(None, micro, inputs))(batch)
            scales = dict.fromkeys(forward.names.terms, jnp.ones((), batch.counts.dtype))
            made = JaxCrossSampleLoss(forward, batch, inputs, scales, self.rows, {}, carry).compute_loss(made).reports
        return mesh.all_gather(made)


@dataclass(frozen=True, eq=False)
class NonFiniteSearchProgram:
    """Finds where a step first became non-finite.

    Attributes:
        forward: the functions of the task, for training.
    """

    forward: Forward

    def __call__(
        self, parameters: Sharded, constants: Sharded, carry: dict[str, Any], batch: DeviceBatch, inputs: Inputs
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For every micro-batch of the global batch: which terms, single rows and gradients are finite.

        Returns:
            Whether each term, by name in order, is finite, (micro-batches, terms); whether each row is when it is
            computed alone, (micro-batches, rows); and whether the gradient of each parameter is, (micro-batches,
            parameters).
        """
        return self.forward.on_devices(self._on_device, parameters, constants, batch, inputs, carry)

    def _on_device(
        self, parameters: Parameters, constants: Parameters, batch: DeviceBatch, inputs: Inputs, carry: dict[str, Any]
    ) -> Any:
        # Whole parameters, so that a gradient belongs to one micro-batch only.
        parameters, forward = self.forward.whole(parameters), replace(self.forward, gathers=False)
        batch, carry = jax.tree.map(lambda array: array[:, 0], (batch, carry))

        def compute_values(parameters: Parameters, micro: DeviceBatch, own: Any) -> Any:
            context = forward.context(micro, inputs, carry=forward.carry(own or None, micro, inputs))
            outputs = forward.outputs(parameters, constants, micro, context)
            if not forward.features.has_local_loss:
                return _total_magnitude(outputs, micro.valid)
            _, sums = forward.loss(outputs, micro.arrays, micro.valid, context)
            return jnp.stack([value for _, value in sorted(sums["sums"].items())])

        def alone(micro: DeviceBatch, own: Any) -> jax.Array:
            def row(_: None, number: jax.Array) -> tuple[None, jax.Array]:
                arrays, state = jax.tree.map(
                    lambda array: jnp.broadcast_to(array[number], array.shape), (micro.arrays, own)
                )
                only = micro.with_rows(arrays, (jnp.arange(len(micro.valid)) == number) & micro.valid)
                return None, jnp.isfinite(compute_values(parameters, only, state)).all()

            _, finite = jax.lax.scan(row, None, jnp.arange(len(micro.valid)))
            return finite

        def one(_: None, given: Any) -> tuple[None, Any]:
            micro, own = given
            values, pull = jax.vjp(lambda p: compute_values(p, micro, own), dict(parameters))
            (gradients,) = pull(jnp.ones_like(values))
            finite = jnp.stack([jnp.isfinite(gradients[name]).all() for name in sorted(gradients)])
            return None, (jnp.isfinite(values), alone(micro, own), finite)

        _, found = jax.lax.scan(one, None, (batch, carry))
        return tuple(mesh.all_gather(part.astype(jnp.int32)) for part in found)


def _total_magnitude(outputs: Any, valid: jax.Array) -> jax.Array:
    """A number that is finite where the outputs of real rows are."""
    leaves = [leaf for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    parts = []
    for leaf in leaves:
        rows = leaf.ndim > 0 and leaf.shape[0] == len(valid)
        mask = valid.reshape(valid.shape + (1,) * (leaf.ndim - 1)) if rows else True
        parts.append(jnp.where(mask, leaf, 0).sum())
    return jnp.stack(parts)
