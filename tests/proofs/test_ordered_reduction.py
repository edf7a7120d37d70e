"""`layout.reduction=ordered`: the same bits on one, two and four processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import ADAMW, SGD, Trace, configuration, traces
from packages.unisono.tests.tasks import TransformerTask

pytestmark = pytest.mark.slow

ROWS = 5 * 24 + 7
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW}


def _runs(world: int, reduction: str = "ordered") -> list[Any]:
    task = TransformerTask(TransformerTask.Config(dropout=0.2, rows=29))
    return [
        (
            task,
            configuration(
                layout={
                    "strategy": "ddp" if world > 1 else "single",
                    "world_size": world,
                    "micro_batch": 2,
                    "reduction": reduction,
                },
                train={"epochs": ROWS / 29, "global_batch": 24, "precision": precision},
                optim=optim,
            ),
        )
        for optim in OPTIMIZERS.values()
        for precision in ("fp32", "fp64")
    ]


@pytest.fixture(scope="module")
def by_world() -> dict[int, list[Trace]]:
    return {
        1: processes.alone(traces, _runs(1)),
        2: processes.run(traces, 2, _runs(2))[0],
        4: processes.run(traces, 4, _runs(4))[0],
    }


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("run", range(4))
def test_bits_do_not_depend_on_the_number_of_processes(by_world: dict[int, list[Trace]], world: int, run: int) -> None:
    mine, reference = by_world[world][run], by_world[1][run]
    assert len(set(reference.losses)) == 6
    assert all(np.any(reference.before[n] != v) for n, v in reference.parameters.items() if "key.bias" not in n)
    for name, value in reference.gradients.items():
        assert np.array_equal(mine.gradients[name], value), name
    for name, value in reference.parameters.items():
        assert np.array_equal(mine.parameters[name], value), name
    assert mine.norms == reference.norms


def test_the_fast_reduction_does_differ_in_bits(by_world: dict[int, list[Trace]]) -> None:
    """Else the test above would say nothing."""
    fast = processes.run(traces, 4, _runs(4, "fast")[:1])[0][0]
    assert any(not np.array_equal(fast.parameters[n], v) for n, v in by_world[1][0].parameters.items())
