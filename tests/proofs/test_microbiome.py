"""The microbiome recipe on layouts: all its losses at once, one of them of all pairs of a global batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests import processes
from tests.proofs.matrix import LAYOUTS, without_gradient
from tests.recipes.microbiome.made import ALL, task
from tests.runs import SGD, Trace, configuration, distance, traces

pytestmark = pytest.mark.slow

CHOSEN = (
    "single", "single m3", "single m1", "ddp×2", "ddp×2 m3", "fsdp×2", "fsdp×2 m3", "ddp×4", "ddp×4 m1", "hsdp 2×2",
    "hsdp 2×2 m1",
)  # fmt: skip
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    made = task(tmp_path_factory.mktemp("cache"))
    rows = 2 * 12 + 5  # three batches, the last one short
    result: dict[str, Trace] = {}
    for world in (1, 2, 4):
        chosen = [name for name in CHOSEN if LAYOUTS[name][0] == world]
        asked = [
            (
                made,
                configuration(
                    layout={"world_size": world, **LAYOUTS[name][1]},
                    train={"epochs": rows / len(made.data()), "precision": "fp64", "clip_norm": 0.5},
                    optim=SGD,
                    eval={"micro_batch": 4},
                ),
            )
            for name in chosen
        ]
        ranks = [processes.alone(traces, asked)] if world == 1 else processes.run(traces, world, asked)
        result |= dict(zip(chosen, ranks[0], strict=True))
    return result


@pytest.mark.parametrize("layout", CHOSEN)
def test_the_recipe_is_trained_as_on_one_process(runs: dict[str, Trace], layout: str) -> None:
    mine, reference = runs[layout], runs["single"]
    assert len(set(reference.losses)) == 3
    assert not without_gradient(reference)
    assert all(np.any(reference.parameters[name] != before) for name, before in reference.before.items())
    assert set(ALL) <= set(reference.metrics[0])
    assert mine.rows == reference.rows
    for quantity in ("before", "gradients", "parameters"):
        worst = distance(getattr(mine, quantity), getattr(reference, quantity))
        assert max(worst.values()) < (TOLERANCE if quantity != "before" else 1e-300), (quantity, worst)
    for ours, theirs in zip(mine.metrics, reference.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert mine.evaluation == pytest.approx(reference.evaluation, rel=1e-9)
    assert reference.evaluation["distance/predicted"] > 0
