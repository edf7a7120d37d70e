"""A task's pure functions on one micro-batch of one device, as the jitted step calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from unisono.engines import rules
from unisono.engines.jax.batches import ColumnNames, DeviceBatch
from unisono.engines.jax.model import Structure
from unisono.engines.jax.numerics import precision
from unisono.engines.jax.parallel import mesh
from unisono.engines.jax.parallel.mesh import BATCH, REPLICATED, Grid
from unisono.engines.observers import StepResult
from unisono.protocols import TaskFeatures
from unisono.runtime.errors import ConfigError
from unisono.runtime.rng import key as address
from unisono.task import Context, Loss, Task, expand_counts

Parameters = Mapping[str, jax.Array]
Scales = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Inputs:
    """The few numbers of a step, the same on every device; two arrays, since each costs a transfer.

    Attributes:
        integers: the step, whether rows have a state already, the key of micro-batches and that of whole losses.
        floats: values by the names that the program was made for.
    """

    integers: Any
    floats: Any

    @classmethod
    def for_step(
        cls, step: int, seed: int, purpose: str, started: bool, floats: Mapping[str, float], kind: str
    ) -> Inputs:
        """Those of a step, as NumPy arrays.

        Args:
            step: updates made before.
            seed: of the run.
            purpose: part of the address of every draw, `dropout` or `eval`.
            started: whether rows have a state that an earlier step has left.
            floats: by name.
            kind: precision of the run.
        """
        numbers = [address(seed, purpose), address(seed, purpose, "loss")]
        halves = [half for number in numbers for half in (number >> 32, number & 0xFFFFFFFF)]
        integers = np.array([step, int(started), *halves], dtype=np.uint32)
        return cls(integers, np.array(list(floats.values()), dtype=np.dtype(precision.wide_dtype(kind))))

    @property
    def step(self) -> jax.Array:
        """Updates made before."""
        return self.integers[0].astype(jnp.int32)

    @property
    def started(self) -> jax.Array:
        """Whether rows have a state already."""
        return self.integers[1] > 0

    def key(self, number: jax.Array, training: bool) -> jax.Array:
        """The key of a global micro-batch: a function of (seed, what, step, number), never of a device."""
        key = jax.random.wrap_key_data(self.integers[2:4], impl="threefry2x32")
        return jax.random.fold_in(jax.random.fold_in(key, self.integers[0]) if training else key, number)

    def loss_key(self, training: bool) -> jax.Array:
        """The key of a loss of the whole global batch, the same on every device."""
        key = jax.random.wrap_key_data(self.integers[4:6], impl="threefry2x32")
        return jax.random.fold_in(key, self.integers[0]) if training else key


jax.tree_util.register_dataclass(Inputs)


@dataclass(frozen=True)
class Columns:
    """Names of the numbers that one micro-batch reports.

    Attributes:
        names: of terms that are counted, and of units of work.
        terms: those that the loss has.
        metrics: of the loss, each a sum and a count.
    """

    names: ColumnNames
    terms: tuple[str, ...]
    metrics: tuple[str, ...]

    def split(self, numbers: Any) -> dict[str, Any]:
        """Numbers (…, n) by what they are: sums and weights of terms, metrics, counts and work."""
        ends = [0, *accumulate(self._widths.values())]
        return {name: numbers[..., a:b] for name, a, b in zip(self._widths, ends, ends[1:], strict=False)}

    def combine(self, reports: Sequence[Any], grad_norm: float = 0.0) -> StepResult:
        """The result of all micro-batches together.

        Sums are added here, in float64 and in the order of the global micro-batches, so no layout changes what is
        reported beyond what its devices computed.

        Args:
            reports: of each global batch, (micro-batches, numbers).
            grad_norm: of the whole gradient.
        """
        parts = self.split(np.concatenate([np.asarray(part, dtype=np.float64) for part in reports]))
        counts = expand_counts(dict(zip(self.names.terms, parts["counts"].sum(0).tolist(), strict=True)), self.terms)
        pairs = parts["metrics"].sum(0).reshape(-1, 2).tolist()
        return rules.build_step_result(
            {n: (total, counts[n]) for n, total in zip(self.terms, parts["sums"].sum(0).tolist(), strict=True)},
            dict(zip(self.terms, self._weights(parts["weights"]), strict=True)),
            {name: (total, count) for name, (total, count) in zip(self.metrics, pairs, strict=True)},
            dict(zip(self.names.work, parts["work"].sum(0).tolist(), strict=True)),
            grad_norm,
        )

    def _weights(self, weights: Any) -> list[float]:  # (micro-batches, terms)
        """The weight of each term, which all micro-batches have to give alike."""
        given = weights[(weights != 0).any(axis=1)]  # a loss of all rows together is counted once, with the first
        if (given != given[:1]).any() and not np.allclose(given, given[0], rtol=1e-6):
            raise ConfigError(
                f"loss() gives the terms {', '.join(self.terms)} different weights in different micro-batches; a "
                "weight must be the same for all rows, and what depends on rows belongs in the sums"
            )
        return [float(weight) for weight in (given[0] if len(given) else weights[0])]

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return sum(self._widths.values())

    @property
    def _widths(self) -> dict[str, int]:
        return {
            "sums": len(self.terms), "weights": len(self.terms), "metrics": 2 * len(self.metrics),
            "counts": len(self.names.terms), "work": len(self.names.work),
        }  # fmt: skip


@dataclass(eq=False)
class Forward:
    """The functions of a task, for training or for evaluation.

    Attributes:
        task: whose they are.
        features: what it can do.
        structure: of its model.
        grid: of devices.
        kind: precision of the run.
        names: of the micro-batches.
        scalars: names of scheduled values that a program is given as numbers.
        static: scheduled values that a program is compiled for.
        training: whether this is training.
        recompute: every N-th block is recomputed in the backward pass; 0 for none.
        gathers: whether it is given this device's shards of parameters; else whole ones.
        columns: what is reported; known once a loss has been traced.
        masked_by_task: sums that the task has made itself, and has to have left rows out of that pad; likewise.
    """

    task: Task
    features: TaskFeatures
    structure: Structure
    grid: Grid
    kind: str
    names: ColumnNames
    scalars: tuple[str, ...]
    static: Mapping[str, float]
    training: bool
    recompute: int = 0
    gathers: bool = True
    columns: Columns | None = None
    masked_by_task: set[str] = field(default_factory=set)

    def context(self, one: DeviceBatch, inputs: Inputs, **more: Any) -> Context:
        """The task's context for a micro-batch."""
        given = {name: inputs.floats[number] for number, name in enumerate(self.scalars)}
        step: Any = inputs.step  # traced, as numbers of the schedule are
        return Context(
            step, training=self.training, scalars={**given, **self.static},
            key=inputs.key(one.number, self.training), valid=one.valid, **more,
        )  # fmt: skip

    def carry(self, kept: Any, one: DeviceBatch, inputs: Inputs) -> Any:
        """The state of a micro-batch's rows: from an earlier step, else the initial one; None without."""
        first = self.features.initial_carry(one.arrays)
        if first is None or kept is None or not self.training:
            return first
        return jax.tree.map(lambda a, b: jnp.where(inputs.started, a, b.astype(a.dtype)), kept, dict(first))

    def on_devices(
        self,
        function: Callable[..., Any],
        parameters: Parameters,
        constants: Parameters,
        batch: DeviceBatch,
        inputs: Inputs,
        *rows: Any,
        out_specs: Any = REPLICATED,
    ) -> Any:
        """A function of each device's part of the arguments; `rows` are arrays that lie as the batch does."""
        arrays = dict(parameters), dict(constants)
        specs = ({name: self.spec(name) for name in some} for some in arrays)
        in_specs = *specs, BATCH, REPLICATED, *(BATCH for _ in rows)
        return self.grid.per_device(function, in_specs, out_specs)(*arrays, batch, inputs, *rows)

    def spec(self, name: str) -> PartitionSpec:
        """The partition spec of an array of the model."""
        return self.grid.spec(self.structure.shapes[name].shape)

    def whole(self, parameters: Parameters) -> dict[str, jax.Array]:
        """Whole parameters from this device's shards, in the dtype in which they are kept."""
        return {name: mesh.gather(array, self.spec(name), array.dtype) for name, array in parameters.items()}

    def outputs(self, parameters: Parameters, constants: Parameters, one: DeviceBatch, context: Context) -> Any:
        """The model's outputs for a micro-batch, in the dtype of losses.

        Args:
            parameters: this device's shards of what is trained.
            constants: of all other arrays.
            one: the micro-batch.
            context: of it.
        """
        compute = precision.COMPUTE[self.kind]
        whole = {name: mesh.gather(array, self.spec(name), array.dtype) for name, array in constants.items()}
        whole |= parameters if not self.gathers else {
            name: mesh.gather(array, self.spec(name), compute) for name, array in parameters.items()
        }  # fmt: skip
        model = self.structure.model(precision.to_compute(whole, self.kind), self.recompute if self.training else 0)
        made = self.task.outputs(model, precision.to_compute(one.arrays, self.kind), context)
        return precision.to_wide(made, self.kind)

    def loss(self, outputs: Any, arrays: Any, valid: jax.Array, context: Context) -> tuple[Loss, dict[str, Any]]:
        """The task's loss, and its sums over the rows that are real: terms, and metrics as pairs.

        Raises:
            ConfigError: for a loss that is not made of such sums.
        """
        task = type(self.task).__name__
        loss = self.task.loss(outputs, arrays, context)
        if not isinstance(loss, Loss):
            raise ConfigError(f"{task}.loss returned a {type(loss).__name__}, not a unisono.Loss")
        rules.check_terms(self.task, loss, self.names.terms, self.training)
        sums = {name: self._sum(value, valid, f"the term '{name}'") for name, value in loss.sums.items()}
        metrics = {
            name: tuple(self._sum(value, valid, f"the metric '{name}'") for value in pair)
            for name, pair in loss.metrics.items()
        }
        wide = precision.wide_dtype(self.kind)
        weights = {name: jax.lax.stop_gradient(jnp.asarray(loss.weights.get(name, 1.0), wide)) for name in sums}
        columns = Columns(self.names, tuple(sorted(sums)), tuple(sorted(metrics)))
        if self.columns not in (None, columns):
            raise ConfigError(f"{task}: the names of terms and metrics changed: {columns}")
        self.columns = columns
        return loss, {"sums": sums, "metrics": metrics, "weights": weights}

    def objective(self, sums: Mapping[str, Any], scales: Scales) -> Any:
        """The scalar to differentiate: each term scaled once by weight / count over the whole global batch."""
        return rules.scaled_sum(sums["sums"], sums["weights"], scales)

    def report(self, sums: Mapping[str, Any] | None, one: DeviceBatch) -> jax.Array:
        """The numbers of one micro-batch as a vector; zeros for its sums where they are None."""
        assert self.columns is not None
        wide = precision.wide_dtype(self.kind)
        terms, metrics = self.columns.terms, self.columns.metrics
        if sums is None:
            return jnp.concatenate([jnp.zeros(2 * len(terms) + 2 * len(metrics), wide), one.counts, one.work])
        found = [sums[kind][name] for kind in ("sums", "weights") for name in terms]
        found += [value for name in metrics for value in sums["metrics"][name]]
        return jnp.concatenate([jnp.stack([jnp.asarray(value, wide) for value in found]), one.counts, one.work])

    def _sum(self, value: Any, valid: jax.Array, what: str) -> jax.Array:
        """The sum over real rows of one number per row; a scalar is taken as it is, if any row is real."""
        rows = valid.shape[0]
        if not isinstance(value, jax.Array):
            raise ConfigError(
                f"{type(self.task).__name__}.loss gives {what} the number {value}, which ignores padding rows of a "
                "short batch; give one number per row, e.g. context.valid for a count of rows"
            )
        if value.shape == valid.shape:
            return jnp.where(valid, value, jnp.zeros_like(value)).sum(dtype=precision.wide_dtype(self.kind))
        if value.ndim:
            raise ConfigError(
                f"{type(self.task).__name__}.loss gives {what} the shape {value.shape}; give one number per row, "
                f"({rows},), or their sum over context.valid"
            )
        self.masked_by_task.add(what)
        return jnp.where(valid.any(), value, jnp.zeros_like(value)).astype(precision.wide_dtype(self.kind))
