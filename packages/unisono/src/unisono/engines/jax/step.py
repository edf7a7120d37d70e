"""The step of every strategy, as one pure function of global arrays: counts before, one scale per term, one norm.

Nothing here knows who observes. A step whose loss or gradient is not finite, or is a spike, leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from unisono.engines import rules
from unisono.engines.jax.batches import DeviceBatch
from unisono.engines.jax.forward import Forward, Inputs, Parameters, Scales
from unisono.engines.jax.numerics.optimizers import Optimizer
from unisono.engines.jax.parallel import mesh
from unisono.engines.jax.parallel.cross_sample import JaxCrossSampleLoss
from unisono.engines.jax.parallel.mesh import BATCH, REPLICATED
from unisono.runtime.errors import ConfigError

Sharded = Mapping[str, jax.Array]
# Gradients, reports of micro-batches, the new state of rows and outputs: of one device.
Accumulated = tuple[dict[str, jax.Array], jax.Array, Any, Any]
# What a step is given besides the scheduled scalars: the largest norm, the largest loss and norm with which it makes an
# update, and how much of the moving average is kept.
LARGEST, LOSS_LIMIT, NORM_LIMIT, AVERAGE_KEPT = CONTROLS = ("largest norm", "loss limit", "norm limit", "average kept")


@dataclass
class State:
    """What a step changes.

    Attributes:
        parameters: that are trained, by name.
        average: their moving average; empty without.
        optimizer: its state.
        carry: of the rows, (passes, devices, rows, …) by name; empty without.
    """

    parameters: dict[str, Any]
    average: dict[str, Any]
    optimizer: Any
    carry: dict[str, Any]


jax.tree_util.register_dataclass(State)


@dataclass
class StepOutcome:
    """The result of a step, the same on every device. A program returns it packed, since each array costs a transfer.

    Attributes:
        loss: of the global batch.
        grad_norm: of the whole gradient before clipping.
        updated: whether the update was made.
        squares: of the gradient of each parameter, summed; in the order of their names.
        weights: the same of the parameters themselves before the update; empty unless asked for.
        reports: of every micro-batch of the global batch in order, (micro-batches, numbers).
    """

    loss: Any
    grad_norm: Any
    updated: Any
    squares: Any
    weights: Any
    reports: Any

    def pack(self) -> jax.Array:
        """All its numbers in one vector."""
        single = jnp.stack([self.loss, self.grad_norm, self.updated])
        return jnp.concatenate([single, self.squares, self.weights, self.reports.ravel()])

    @classmethod
    def unpack(cls, packed: np.ndarray[Any, Any], parameters: int, weights: int, numbers: int) -> StepOutcome:
        """The outcome on the host.

        Args:
            packed: by `pack`.
            parameters: how many are trained.
            weights: of how many of them the squares are there, too.
            numbers: how many a micro-batch reports.
        """
        loss, grad_norm, updated = packed[:3].tolist()
        squares, of_weights, reports = np.split(packed[3:], [parameters, parameters + weights])
        return cls(loss, grad_norm, bool(updated), squares, of_weights, reports.reshape(-1, numbers))


@dataclass
class ObservedStep:
    """Extra results for observers.

    Attributes:
        raw: gradients of the global batch by name.
        clipped: the same as the optimizer gets them.
        outputs: what the task returned, (passes, devices, rows, …).
    """

    raw: dict[str, Any]
    clipped: dict[str, Any]
    outputs: Any


jax.tree_util.register_dataclass(ObservedStep)


@dataclass(frozen=True, eq=False)
class Step:
    """The training step.

    Attributes:
        forward: the functions of the task.
        optimizer: makes the update.
        passes: of every device.
        defer: whether gradients of sharded parameters are added up once per step instead of once per pass.
        rows: real rows of the global batch, for a loss across samples; else 0.
        norms: whether the squares of the parameters are reported.
    """

    forward: Forward
    optimizer: Optimizer
    passes: int
    defer: bool = False
    rows: int = 0
    norms: bool = False

    def __call__(self, state: State, constants: Sharded, batch: DeviceBatch, inputs: Inputs) -> tuple[State, jax.Array]:
        """One update of the state, and its outcome, packed."""
        after, outcome, _ = self.observed(state, constants, batch, inputs)
        return after, outcome

    def observed(
        self, state: State, constants: Sharded, batch: DeviceBatch, inputs: Inputs
    ) -> tuple[State, jax.Array, ObservedStep]:
        """The same update, with the extra results for observers."""
        raw, reports, carry, outputs = self.gradients(state, constants, batch, inputs)
        made, outcome, clipped = self.finish(replace(state, carry={}), raw, reports, inputs)
        made.carry = carry
        return made, outcome, ObservedStep(raw, clipped, outputs)

    def finish(
        self, before: State, raw: Sharded, reports: jax.Array, inputs: Inputs
    ) -> tuple[State, jax.Array, dict[str, jax.Array]]:
        """What comes after the raw gradient: the state after the update, the outcome packed, and clipped gradients.

        The state comes and goes without that of rows.
        """
        numbers = self.numbers(inputs)
        squares = jnp.stack([jnp.square(raw[name]).sum() for name in sorted(raw)])
        own = before.parameters if self.norms else {}
        weights = jnp.array([jnp.square(own[name]).sum() for name in sorted(own)], squares.dtype)
        grad_norm = jnp.sqrt(squares.sum())
        loss = self.loss(reports)
        updated = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updated &= (loss <= numbers[LOSS_LIMIT]) & (grad_norm <= numbers[NORM_LIMIT])
        largest = numbers[LARGEST]
        clipping = jnp.where(grad_norm > largest, rules.shrinking_factor(grad_norm, largest), 1.0)
        clipped = {name: gradient * clipping for name, gradient in raw.items()}
        # A branch: to choose between old and new numbers, XLA keeps both, and reads the whole state once more.
        made = jax.lax.cond(updated, lambda: self.update(before, clipped, numbers), lambda: before)
        return made, StepOutcome(loss, grad_norm, updated, squares, weights, reports).pack(), clipped

    def numbers(self, inputs: Inputs) -> dict[str, jax.Array]:
        """Scheduled scalars and controls by name."""
        return dict(zip((*self.forward.scalars, *CONTROLS), inputs.floats, strict=True))

    def update(self, state: State, gradients: Sharded, numbers: Mapping[str, jax.Array]) -> State:
        """The state after one update from clipped gradients; without the state of rows."""
        parameters, optimizer = self.optimizer.update(dict(gradients), state.optimizer, state.parameters, numbers)
        kept = numbers[AVERAGE_KEPT]
        average = {name: kept * value + (1 - kept) * parameters[name] for name, value in state.average.items()}
        return State(parameters, average, optimizer, {})

    def gradients(
        self, state: State, constants: Sharded, batch: DeviceBatch, inputs: Inputs
    ) -> tuple[dict[str, jax.Array], jax.Array, dict[str, Any], Any]:
        """The global batch's raw gradient, its micro-batches' reports, the new state of its rows, and outputs."""
        specs = {name: self.forward.spec(name) for name in state.parameters}
        found: tuple[dict[str, jax.Array], jax.Array, dict[str, Any], Any] = self.forward.on_devices(
            self._on_device, state.parameters, constants, batch, inputs, state.carry,
            out_specs=(specs, REPLICATED, BATCH, BATCH),
        )  # fmt: skip
        return found

    def loss(self, reports: jax.Array) -> Any:
        """The loss of the global batch."""
        columns = self.forward.columns
        assert columns is not None
        parts = columns.split(reports)
        counts = dict(zip(columns.names.terms, parts["counts"].sum(0), strict=True))
        weights, sums = parts["weights"][0], parts["sums"].sum(0)
        return rules.scaled_sum(
            dict(zip(columns.terms, sums, strict=True)),
            dict(zip(columns.terms, weights, strict=True)),
            rules.loss_scales(counts, 1.0, jnp.where),
        )

    # on one device ------------------------------------------------------------------------------------------------

    def _on_device(
        self, parameters: Parameters, constants: Parameters, batch: DeviceBatch, inputs: Inputs, carry: dict[str, Any]
    ) -> tuple[dict[str, jax.Array], jax.Array, dict[str, Any], Any]:
        batch, carry = jax.tree.map(lambda array: array[:, 0], (batch, carry))  # (passes, rows, …): it has one device's
        forward = replace(self.forward, gathers=False) if self.defer else self.forward
        whole = forward.whole(parameters) if self.defer else parameters
        device = _Device(forward, self, whole, constants, batch, inputs, scales(forward, batch))
        kept = device.carry(carry)
        totals = device.totals(kept)
        crosses = forward.features.cross_sample is not None
        compute = partial(device.across_samples if crosses else device.by_micro_batch, totals, kept)
        computed, transposed = mesh.find_transposed_products(compute) if forward.grid.is_cpu else (compute(), set())
        gradients, reports, left, outputs = computed
        self.forward.columns = forward.columns
        if self.defer:
            gradients = {name: mesh.scatter(value, forward.spec(name)) for name, value in gradients.items()}
        specs = {name: forward.spec(name) for name in gradients}
        gradients, reports = mesh.sum_gradients(gradients, specs, reports, transposed)
        if left is not None:
            if not carry:
                raise ConfigError(
                    f"{type(forward.task).__name__}.loss returns a carry, but there is no initial_carry()"
                )
            kept = jax.tree.map(lambda new, old: _where_rows(batch.valid, new, old), dict(left), kept)
        after = jax.tree.map(lambda array: array[:, None], (kept if carry else {}, outputs))
        return gradients, reports, *after


@dataclass(frozen=True, eq=False)
class _Device:
    """One device's part of one step."""

    forward: Forward
    step: Step
    parameters: Parameters
    constants: Parameters
    batch: DeviceBatch
    inputs: Inputs
    scales: Scales

    @property
    def _regathers(self) -> bool:
        return self.forward.gathers and self.forward.grid.shards > 1

    def carry(self, kept: dict[str, Any]) -> Any:
        """The state of this device's rows before the step, (passes, rows, …); None without."""
        return jax.vmap(lambda micro, own: self.forward.carry(own or None, micro, self.inputs))(self.batch, kept)

    def totals(self, kept: Any) -> dict[str, jax.Array]:
        """`Task.totals` over the global batch, from a pass without gradients; empty if not needed."""
        forward = self.forward
        if forward.features.totals is None:
            return {}

        def one(_: None, given: Any) -> tuple[None, Any]:
            micro, own = given
            context = forward.context(micro, self.inputs, carry=own)
            outputs = forward.outputs(self.parameters, self.constants, micro, context)
            totals: Mapping[str, Any] = forward.features.compute_totals(outputs, micro.arrays, context)
            any_row = micro.valid.any()
            wide = self.batch.counts.dtype
            return None, {name: jnp.where(any_row, value, 0).astype(wide) for name, value in totals.items()}

        _, totals = _scan(one, None, (self.batch, kept))
        return {name: jax.lax.psum(jax.lax.stop_gradient(value.sum(0)), mesh.DEVICES) for name, value in totals.items()}

    def by_micro_batch(self, totals: Any, kept: Any) -> Accumulated:
        """For a loss that is a sum over rows."""
        forward = self.forward

        def objective(
            parameters: Parameters, micro: DeviceBatch, own: Any
        ) -> tuple[jax.Array, tuple[jax.Array, Any, Any]]:
            context = forward.context(micro, self.inputs, totals=totals, carry=own)
            outputs = forward.outputs(parameters, self.constants, micro, context)
            loss, sums = forward.loss(outputs, micro.arrays, micro.valid, context)
            return forward.objective(sums, self.scales), (forward.report(sums, micro), loss.carry, outputs)

        objective = mesh.regather_in_backward(objective) if self._regathers else objective

        def one(gathered: Any, given: Any) -> tuple[Any, tuple[jax.Array, Any, Any]]:
            gradients, made = jax.grad(objective, has_aux=True)(self.parameters, *given)
            return gradients if gathered is None else jax.tree.map(jnp.add, gathered, gradients), made

        nothing = jax.tree.map(jnp.zeros_like, dict(self.parameters)) if self.step.passes > 1 else None
        gradients, (reports, left, outputs) = _scan(one, nothing, (self.batch, kept))
        return gradients, reports, left, outputs

    def across_samples(self, totals: Any, kept: Any) -> Accumulated:
        """The same for a loss across samples, in two passes where a device has several micro-batches."""
        forward = self.forward

        def outputs(parameters: Parameters, micro: DeviceBatch, own: Any) -> tuple[Any, Any]:
            context = forward.context(micro, self.inputs, totals=totals, carry=own)
            return eqx.partition(forward.outputs(parameters, self.constants, micro, context), eqx.is_inexact_array)

        outputs = mesh.regather_in_backward(outputs) if self._regathers else outputs
        crossing = JaxCrossSampleLoss(forward, self.batch, self.inputs, self.scales, self.step.rows, totals, kept)
        if self.step.passes == 1:
            only = jax.tree.map(lambda array: array[0], (self.batch, kept))
            floats, pull, others = jax.vjp(lambda p: outputs(p, *only), dict(self.parameters), has_aux=True)
            found = jax.tree.map(lambda array: array[None], eqx.combine(floats, others))
            settled = crossing.compute_loss(found)
            (gradients,) = pull(jax.tree.map(lambda array: array[0], settled.gradients))
            return gradients, settled.reports, settled.carry, found

        def first(_: None, given: Any) -> tuple[None, Any]:
            return None, eqx.combine(*outputs(self.parameters, *given))

        _, found = jax.lax.scan(first, None, (self.batch, kept))
        settled = crossing.compute_loss(jax.lax.stop_gradient(found))

        def second(gathered: Any, given: Any) -> tuple[Any, None]:
            micro, own, gradient = given
            _, pull, _ = jax.vjp(lambda p: outputs(p, micro, own), dict(self.parameters), has_aux=True)
            return jax.tree.map(jnp.add, gathered, pull(gradient)[0]), None

        nothing = jax.tree.map(jnp.zeros_like, dict(self.parameters))
        gradients, _ = jax.lax.scan(second, nothing, (self.batch, kept, settled.gradients))
        return gradients, settled.reports, settled.carry, found


def scales(forward: Forward, batch: DeviceBatch) -> dict[str, jax.Array]:
    """The scale of each term's sum: 1 / count over the whole global batch, or zero."""
    counts = jax.lax.psum(batch.counts.sum(0), mesh.DEVICES)  # (terms,)
    return rules.loss_scales(dict(zip(forward.names.terms, counts, strict=True)), 1.0, jnp.where)


def _scan(one: Any, begin: Any, given: Any) -> Any:
    """`jax.lax.scan`, or a plain call where there is one pass."""
    if len(jax.tree.leaves(given)[0]) > 1:
        return jax.lax.scan(one, begin, given)
    end, made = one(begin, jax.tree.map(lambda array: array[0], given))
    return end, jax.tree.map(lambda array: array[None], made)


def _where_rows(valid: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Rows (passes, rows, …) that are real from the one, the others from the other."""
    return jnp.where(valid.reshape(valid.shape + (1,) * (new.ndim - valid.ndim)), new.astype(old.dtype), old)
