"""What one device computes of each objective, any number of devices and micro-batches computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.jax_runs import Trace, configuration, layout, trace
from packages.unisono.tests.runs import assert_same
from recipes.birdsong.tests.small import task

KNOWN: dict[str, Trace] = {}
MANY = {
    "4 devices": layout(4, "ddp", micro_batch=2),
    "2 devices, 2 passes each": layout(2, "fsdp", micro_batch=2),
    "4 passes": layout(micro_batch=2),
}


def run(objective: str, layout: dict[str, Any], **config: Any) -> Trace:
    """What four steps came to, the last of them short; the same run is made once."""
    key = repr([objective, sorted(layout.items()), config])
    if key not in KNOWN:
        train = {"epochs": 1, "global_batch": 8, "precision": "fp64", "clip_norm": 1.0}
        made = task(objective, data={"recordings": 29}, **config)
        KNOWN[key] = trace(made, configuration(layout=layout, train=train))
    return KNOWN[key]


def assert_trains(one: Trace) -> None:
    assert len({round(loss, 9) for loss in one.losses}) == len(one.losses) == 4
    assert len(one.rows[-1]) == 5  # the last batch is short
    moved = [name for name, value in one.parameters.items() if not np.array_equal(one.before[name], value)]
    assert len(moved) == len(one.parameters)
    assert all(np.abs(gradient).max() > 1e-9 for gradient in one.gradients.values())
    assert {"embedding_spread", "embedding_rank", "probe_accuracy"} <= one.metrics[0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["supervised", "lejepa", "pixio"])
@pytest.mark.parametrize("mine", MANY.values(), ids=MANY)
def test_every_layout_computes_what_one_device_computes(objective: str, mine: dict[str, Any]) -> None:
    one = run(objective, layout(micro_batch=8))
    assert_trains(one)
    assert objective != "lejepa" or one.metrics[0]["sigreg"] > 1e-3
    assert_same(run(objective, mine), one, 1e-12)
