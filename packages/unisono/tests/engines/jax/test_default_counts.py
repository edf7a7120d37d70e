"""A task in JAX without `counts`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from packages.unisono.tests.jax_runs import configuration, layout, trace
from packages.unisono.tests.jax_tasks import LinearTask
from packages.unisono.tests.runs import assert_same
from unisono import Context, Loss, Task
from unisono.runtime.errors import ConfigError


class Uncounted(LinearTask):
    counts = Task.counts  # type: ignore[assignment]


class Mean(Uncounted):
    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        error = jnp.square(outputs - batch["y"]).sum(1)
        return Loss({"square": (error * context.valid).sum() / context.valid.sum()})


def test_a_task_without_counts_trains_as_with_a_count_of_rows() -> None:
    config = {
        "train": {"global_batch": 12, "precision": "fp64", "epochs": 1},
        "layout": layout(2, "ddp", micro_batch=3),
    }
    counted, uncounted = (trace(kind(), configuration(**config)) for kind in (LinearTask, Uncounted))
    assert_same(counted, uncounted)


def test_a_mean_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a mean"):
        trace(Mean(), configuration(train={"global_batch": 12, "epochs": 1}, layout=layout(micro_batch=3)))
