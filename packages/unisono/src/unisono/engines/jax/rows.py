"""What a task computes for rows outside of a run: its outputs and its loss, jitted, on one device.

In the precision of the run, as an evaluation computes them; `precision.pin` must be in force.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_map_with_path

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.jax.model import key_from_bits
from unisono.engines.jax.numerics import precision
from unisono.protocols import resolve_features
from unisono.runtime.errors import ConfigError
from unisono.runtime.rng import key as address
from unisono.task import Context, Loss, Task


class RowForward:
    """Outputs and loss of micro-batches by a model.

    Args:
        task: whose functions they are.
        model: the pytree that it has built, with weights.
        seed: of the run, from which a task that draws in evaluation gets its keys.
        kind: `train.precision` of the run.
        device: cpu, gpu, …; auto for JAX's own choice.

    Raises:
        ConfigError: for a device that JAX does not have.
    """

    def __init__(self, task: Task, model: Any, seed: int, kind: str, device: str) -> None:
        try:
            self.device = jax.devices(None if device == "auto" else device)[0]
        except RuntimeError as error:
            raise ConfigError(f"device={device}: JAX has no such device here ({error})") from error
        self._task, self._seed, self._kind = task, seed, kind
        self._features = resolve_features(task)
        self._model = jax.device_put(eqx.filter(model, eqx.is_array), self.device)
        self._rest = eqx.filter(model, eqx.is_array, inverse=True)
        self._program = jax.jit(self._compute, static_argnums=0)

    def __call__(self, micro: MicroBatch, context: Context) -> tuple[Any, Loss | None]:
        """Outputs and loss as NumPy arrays; no loss where it looks across rows.

        Args:
            micro: rows; another number of them is another program.
            context: of the checkpoint, in evaluation.
        """
        key = jax.random.fold_in(key_from_bits(address(self._seed, "eval")), micro.number)
        scalars = tuple(sorted(context.scalars.items()))
        host = tree_map_with_path(
            lambda path, leaf: precision.on_host(np.asarray(leaf), self._kind, keystr(path, simple=True)), micro.arrays
        )
        arrays = jax.device_put(host, self.device)
        outputs, loss = jax.device_get(self._program((context.step, scalars), self._model, arrays, key))
        return outputs, None if loss is None else Loss(loss["sums"], loss["weights"], loss["metrics"])

    def _compute(self, known: Any, arrays: Any, batch: Any, key: jax.Array) -> tuple[Any, Any]:
        step, scalars = known
        rows = len(jax.tree.leaves(batch)[0])
        context = Context(
            step, training=False, scalars=dict(scalars), key=key, valid=jnp.ones(rows, bool),
            carry=self._features.initial_carry(batch),
        )  # fmt: skip
        model = eqx.combine(precision.to_compute(arrays, self._kind), self._rest)
        outputs = self._task.outputs(model, precision.to_compute(batch, self._kind), context)
        outputs = precision.to_wide(outputs, self._kind)
        if self._features.cross_sample is not None:
            return outputs, None
        loss = self._task.loss(outputs, batch, context)
        sums, metrics = jax.tree.map(jnp.sum, (dict(loss.sums), dict(loss.metrics)))
        return outputs, {"sums": sums, "metrics": metrics, "weights": dict(loss.weights)}
