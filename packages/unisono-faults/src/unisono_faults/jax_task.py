"""The task into which faults are injected, in JAX; see `unisono_faults.task`. Like that one, it is copied to the runs.

A jitted function cannot fail at a step of its own, so a fault of the forward pass happens at the beginning of the step.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from unisono.task import Context, Loss
from unisono_faults.task_fault import FaultyTask


class Network(eqx.Module):
    """Two layers."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        first_key, last_key = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(5, width, key=first_key), eqx.nn.Linear(width, 1, key=last_key)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:  # (5,) -> (1,)
        """The predicted sum of a row."""
        return self.last(jnp.where(mask, jax.nn.relu(self.first(x)) / 0.9, 0.0))


class Small(FaultyTask):
    """Least squares by a small network with dropout, on noisy rows."""

    engine = "jax"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "RANK" in os.environ:  # not in the launcher
            self._watch_steps()

    def _watch_steps(self) -> None:
        """Inject the fault in the main thread of a rank, in the requested step."""
        from unisono.engines.jax.engine import JaxEngine

        fault, original = self.fault, JaxEngine.step

        @functools.wraps(original)
        def step(engine: JaxEngine, batches: Any, number: int, scalars: Any) -> Any:
            time.sleep(self.config.sleep)
            if fault is not None and fault.is_due("forward", number):
                fault.trigger()
            return original(engine, batches, number, scalars)

        setattr(JaxEngine, "step", step)  # noqa: B010 - mypy rejects replacing a method

    def build(self, key: jax.Array) -> Network:
        """The network."""
        return Network(self.config.width, key)

    def outputs(self, model: Any, batch: Mapping[str, Any], context: Context) -> Any:
        """The outputs of the network."""
        assert context.key is not None
        shape = (len(batch["x"]), self.config.width)
        mask = jax.random.bernoulli(context.key, 0.9, shape) if context.training else jnp.ones(shape, bool)
        return jax.vmap(model)(batch["x"], mask)

    def loss(self, outputs: jax.Array, batch: Mapping[str, Any], context: Context) -> Loss:
        """The sum of squares."""
        errors: Any = (outputs - batch["y"])[:, 0]
        squares: Any = jnp.square(errors)
        return Loss({"square": squares}, metrics={"bias": (errors, context.valid)})
