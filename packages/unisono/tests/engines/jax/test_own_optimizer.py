"""A task's own optimizer in JAX."""

from __future__ import annotations

from typing import Any

import optax

from packages.unisono.tests.jax_runs import layout, trace
from packages.unisono.tests.jax_tasks import LinearTask
from packages.unisono.tests.runs import configuration, distance


def test_in_jax_a_transformation_of_optax_makes_the_direction():
    """That of SGD by the task's own hand gives the run of `optim=sgd`, and another one does not."""

    class Own(LinearTask):
        direction: Any = optax.identity()

        def optimizer(self, groups: Any) -> Any:
            assert [sorted(group) for group in groups] == [["params", "weight_decay"]] * len(groups)
            return self.direction

    class Radam(Own):
        direction: Any = optax.scale_by_radam()

    settings = configuration(
        train={"steps": 4, "global_batch": 8, "precision": "fp64"},
        observe={"progress": False},
        layout=layout(),
        optim={"kind": "sgd", "lr": 0.1},
    )
    ours, own, radam = (trace(kind(), settings) for kind in (LinearTask, Own, Radam))
    assert max(distance(ours.parameters, own.parameters).values()) == 0
    assert max(distance(ours.parameters, radam.parameters).values()) > 1e-6
