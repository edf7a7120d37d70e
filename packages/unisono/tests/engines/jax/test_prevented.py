"""Faults of distributed training in JAX that cannot happen here: they are refused before or when they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import pytest

from packages.unisono.tests.jax_runs import configuration, layout, trace
from packages.unisono.tests.jax_tasks import LinearTask
from unisono.engines.jax.engine import JaxEngine
from unisono.engines.jax.parallel import mesh, runtime
from unisono.runtime.communication.listening import reserve_port
from unisono.runtime.errors import ConfigError, DeadlineError
from unisono.task import Context, Loss

TRAIN = {"global_batch": 8, "steps": 2, "precision": "fp64"}


def test_buffers_from_before_an_update_cannot_be_used_again() -> None:
    """The state of a step is donated to it, so whoever keeps it gets an error, and no old numbers."""
    kept: list[Any] = []
    made = JaxEngine.step

    def step(self: JaxEngine, *given: Any) -> Any:
        kept.extend(jax.tree.leaves(self.held.state))
        return made(self, *given)

    with mock.patch.object(JaxEngine, "step", step):
        trace(LinearTask(), configuration(layout=layout(2, "ddp"), train=TRAIN))
    with pytest.raises(RuntimeError, match="deleted"):
        jax.device_get(kept)


class Reducing(LinearTask):
    """It adds up its loss over devices by itself."""

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        loss = super().loss(outputs, batch, context)
        return replace(loss, sums={"square": jax.lax.psum(loss.sums["square"], mesh.DEVICES)})


def test_a_task_cannot_reduce_over_devices() -> None:
    """So it cannot forget to, nor do it twice."""
    with pytest.raises(ConfigError, match="unbound axis name"):
        trace(Reducing(), configuration(layout=layout(2, "ddp"), train=TRAIN))


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    """JAX would abort the process."""
    held = reserve_port("127.0.0.1")  # bound, and nobody listens
    port = held.getsockname()[1]
    with (
        held,
        pytest.raises(
            DeadlineError, match=rf"JAX's coordinator at 127.0.0.1:{port} \(rank 0\) did not respond to rank 1"
        ),
    ):
        runtime._probe("127.0.0.1", port, 1, 0.3)
