"""The first update of a long warm-up in JAX may be lost to rounding; one that is lost otherwise is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from packages.unisono.tests.jax_runs import layout, trace
from packages.unisono.tests.jax_tasks import LinearTask
from packages.unisono.tests.runs import configuration
from unisono.runtime.errors import GuardError


class Ones(LinearTask):
    """Without a zero, at which any change is visible."""

    def build(self, key: jax.Array) -> Any:
        return jax.tree.map(jnp.ones_like, super().build(key))


class Still(Ones):
    def optimizer(self, groups: Any) -> Any:
        return optax.scale(0.0)


def run(task: LinearTask, lr: float, steps: int = 1, warmup: int = 0) -> Any:
    train = {"steps": steps, "global_batch": 8, "guard_every": 2}
    given = {
        "train": train,
        "optim": {"kind": "adamw", "lr": lr, "weight_decay": 0.0},
        "schedules": {"lr": {"kind": "constant", "warmup": warmup}},
    }
    return trace(task, configuration(observe={"progress": False}, layout=layout(), **given))


def test_an_update_that_is_lost_to_rounding_is_no_fault() -> None:
    """At the beginning of a warm-up of 60,000 steps to 3e-4 the rate is 5e-9."""
    assert all(np.array_equal(array, np.ones_like(array)) for array in run(Ones(), 5e-9).parameters.values())


def test_an_update_that_changes_nothing_at_an_ordinary_rate_is_refused() -> None:
    with pytest.raises(GuardError, match="the update changed none of the 2 parameters that have a gradient"):
        run(Still(), 3e-4)


def test_an_update_that_changes_nothing_is_refused_as_soon_as_the_warm_up_makes_it_large_enough() -> None:
    """The first update is lost to rounding, as it may be; the second is looked at again."""
    run(Still(), 1.1e-7, steps=2, warmup=2)
    with pytest.raises(GuardError, match="the update changed none of the 2 parameters that have a gradient"):
        run(Still(), 2.2e-7, steps=2, warmup=2)
