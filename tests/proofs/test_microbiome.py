"""The microbiome recipe on layouts: all its losses at once, one of them of all pairs of a global batch."""

from __future__ import annotations

import numpy as np
import pytest

from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import SGD, Trace, assert_same, configuration, without_gradient
from recipes.microbiome.tests.made import ALL, task
from tests.proofs.matrix import run_all
from unisono.config.schema.run import RunConfig

pytestmark = pytest.mark.slow

CHOSEN = (
    "single", "single m3", "single m1", "ddp×2", "ddp×2 m3", "fsdp×2", "fsdp×2 m3", "ddp×4", "ddp×4 m1", "hsdp 2×2",
    "hsdp 2×2 m1",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    made = task(tmp_path_factory.mktemp("cache"))
    epochs = (2 * 12 + 5) / len(made.data())  # three batches, the last one short

    def config(layout: str) -> RunConfig:
        world, keys = LAYOUTS[layout]
        return configuration(
            layout={"world_size": world, **keys},
            train={"epochs": epochs, "precision": "fp64", "clip_norm": 0.5},
            optim=SGD,
            eval={"micro_batch": 4},
        )

    return run_all({layout: (made, config(layout)) for layout in CHOSEN})


@pytest.mark.parametrize("layout", CHOSEN)
def test_the_recipe_is_trained_as_on_one_process(runs: dict[str, Trace], layout: str) -> None:
    reference = runs["single"]
    assert len(set(reference.losses)) == 3
    assert not without_gradient(reference)
    assert all(np.any(reference.parameters[name] != before) for name, before in reference.before.items())
    assert set(ALL) <= set(reference.metrics[0])
    assert_same(runs[layout], reference, 1e-12)
    assert reference.evaluation["distance/predicted"] > 0


def test_covariates_transforms_and_other_targets_are_trained_as_on_one_process(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    made = task(
        tmp_path_factory.mktemp("cache"), {"distance": 1.0, "shannon": 0.5, "target": 2.0}, {"covariates": "gated"},
        {"loss": "asymmetric", "asymmetry": 0.8}, metric="aitchison", covariates=["kind"], target_by="kind",
        group_by_length="balanced",
    )  # fmt: skip

    def config(layout: str) -> RunConfig:
        world, keys = LAYOUTS[layout]
        return configuration(
            layout={"world_size": world, **keys},
            train={"steps": 3, "precision": "fp64", "clip_norm": 0.5},
            optim=SGD,
            eval={"micro_batch": 4},
        )

    layouts = ("single", "single m3", "ddp×2 m3", "fsdp×2", "hsdp 2×2 m1")
    runs = run_all({layout: (made, config(layout)) for layout in layouts})
    assert not without_gradient(runs["single"])
    for layout in layouts[1:]:
        assert_same(runs[layout], runs["single"], 1e-12)
