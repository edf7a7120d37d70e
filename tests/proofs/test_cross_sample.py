"""Losses across samples on every layout: a regression of pairs, a contrast, and a loss that no row has a share of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.pairs import ROWS, Paired
from packages.unisono.tests.runs import SGD, Trace, assert_same, configuration
from tests.proofs.matrix import run_all
from unisono.config.schema.run import RunConfig

pytestmark = pytest.mark.slow

LOSSES = ("distance", "contrast", "whole")
DROPOUT = 0.25
# name -> (processes, layout); rows of the global batch: 16, of the last one 5, which leaves two of four processes none
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single m8": (1, {"micro_batch": 8}),
    "single m2": (1, {"micro_batch": 2}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "ddp×2 m4": (2, {"strategy": "ddp", "micro_batch": 4}),
    "ddp×2 m1": (2, {"strategy": "ddp", "micro_batch": 1}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "fsdp×2 m2": (2, {"strategy": "fsdp", "micro_batch": 2}),
    "fsdp×2 m2 deferred": (2, {"strategy": "fsdp", "micro_batch": 2, "defer_reduction": True}),
    "ddp×4": (4, {"strategy": "ddp"}),
    "ddp×4 m2": (4, {"strategy": "ddp", "micro_batch": 2}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
    "hsdp 2×2 m2": (4, {"strategy": "hsdp", "shards": 2, "micro_batch": 2}),
}
# What is drawn per micro-batch makes it part of the mathematics, so with dropout it is that of the reference.
CHOSEN: dict[tuple[str, float], tuple[str, ...]] = {
    ("distance", 0.0): tuple(LAYOUTS),
    ("distance", DROPOUT): ("single m2", "fsdp×2 m2", "ddp×4 m2", "hsdp 2×2 m2"),
    ("contrast", 0.0): ("single", "single m2", "ddp×2 m1", "fsdp×2", "ddp×4 m2", "hsdp 2×2"),
    ("contrast", DROPOUT): ("single m2", "fsdp×2 m2"),
    ("whole", 0.0): ("single", "single m2", "ddp×2", "fsdp×2 m2", "ddp×4", "hsdp 2×2 m2"),
    ("whole", DROPOUT): ("single m2", "ddp×4 m2"),
}
Case = tuple[str, float, str]
CASES: list[Case] = [(*what, layout) for what, layouts in CHOSEN.items() for layout in layouts]


def config(layout: str) -> RunConfig:
    world, keys = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, **keys},
        train={"epochs": 1.0, "global_batch": 16, "precision": "fp64", "guard_every": 2, "clip_norm": 0.5},
        optim=SGD,
        eval={"micro_batch": 3},
    )


@pytest.fixture(scope="module")
def runs() -> dict[Case, Trace]:
    return run_all(
        {
            (loss, dropout, layout): (Paired(Paired.Config(loss=loss, dropout=dropout)), config(layout))
            for loss, dropout, layout in CASES
        }
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_loss_across_samples_is_that_of_one_process(runs: dict[Case, Trace], case: Case) -> None:
    loss, dropout, _ = case
    mine, reference = runs[case], runs[loss, dropout, "single m2" if dropout else "single"]
    assert len(set(reference.losses)) == len(reference.losses) == 3
    assert [len(rows) for rows in reference.rows] == [16, 16, ROWS - 32]
    assert all(np.any(gradient) for gradient in reference.gradients.values())
    assert all(np.any(reference.parameters[name] != before) for name, before in reference.before.items())
    assert all(len(step) >= 3 for step in reference.metrics)
    assert_same(mine, reference, 1e-12)


@pytest.mark.parametrize("loss", LOSSES)
def test_dropout_changes_the_run(runs: dict[Case, Trace], loss: str) -> None:
    assert runs[loss, 0.0, "single m2"].losses[0] != pytest.approx(runs[loss, DROPOUT, "single m2"].losses[0], rel=1e-6)
