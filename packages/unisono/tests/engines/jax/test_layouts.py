"""What one device computes, any number of them computes: gradients, norms, losses, parameters, averages, evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.jax_runs import Trace, configuration, layout, trace
from packages.unisono.tests.jax_tasks import TransformerTask, UnevenTask
from packages.unisono.tests.runs import ADAMW, assert_same
from unisono.task import Task

KNOWN: dict[str, Trace] = {}
ONE = layout(micro_batch=3)
MANY = {
    "one pass each": layout(4, "ddp"),
    "two passes each": layout(2, "ddp", micro_batch=3),
    "sharded": layout(4, "fsdp"),
    "sharded, two passes": layout(2, "fsdp", micro_batch=3),
    "sharded, reduced once": layout(2, "fsdp", micro_batch=3, defer_reduction=True),
    "replicas of shards": layout(4, "hsdp", shards=2, micro_batch=3),
}


def run(task: Task, layout: dict[str, Any], precision: str = "fp64", **groups: Any) -> Trace:
    """What a run came to; the same one is made once."""
    key = repr([task.config, sorted(layout.items()), precision, groups])
    if key not in KNOWN:
        train = {"epochs": 2, "global_batch": 12, "precision": precision}
        KNOWN[key] = trace(task, configuration(layout=layout, train=train, ema={"decay": 0.9}, **groups))
    return KNOWN[key]


def assert_same_program(mine: Trace, one: Trace, floor: float) -> None:
    assert_same(mine, one, floor)
    assert not any(mine.recompiled)  # nor for a short batch


@pytest.fixture(scope="module")
def one() -> Trace:
    return run(UnevenTask(UnevenTask.Config(dropout=0.2)), ONE)


def test_the_run_that_others_are_held_against_trains(one: Trace) -> None:
    assert one.losses[-1] < 0.8 * one.losses[0]
    assert all(np.abs(gradient).max() > 1e-3 for gradient in one.gradients.values())
    assert all(not np.array_equal(one.before[name], value) for name, value in one.parameters.items())
    assert len(one.losses) == 5 and len(one.rows[-1]) == 6  # the last batch is short
    counts = [metrics["targets"] for metrics in one.metrics]
    assert len(set(counts)) > 3  # steps count different things
    assert any(not np.array_equal(one.average[name], value) for name, value in one.parameters.items())


@pytest.mark.parametrize("layout", MANY.values(), ids=MANY)
def test_every_layout_computes_what_one_device_computes(one: Trace, layout: dict[str, Any]) -> None:
    assert_same_program(run(UnevenTask(UnevenTask.Config(dropout=0.2)), layout), one, 1e-12)


def test_the_dropout_of_a_micro_batch_is_its_own(one: Trace) -> None:
    """It is seen: other micro-batches draw otherwise, and so does none at all."""
    other = run(UnevenTask(UnevenTask.Config(dropout=0.2)), layout(micro_batch=6))
    without = run(UnevenTask(), layout())
    assert abs(other.losses[0] - one.losses[0]) > 1e-3
    assert abs(without.losses[0] - one.losses[0]) > 1e-3


SLOW = [pytest.param(layout(micro_batch=rows), marks=pytest.mark.slow) for rows in (4, 2, 1)]


@pytest.mark.parametrize("mine", [layout(micro_batch=6), layout(2, "ddp", micro_batch=3), *SLOW])
def test_any_number_of_passes_changes_nothing_where_nothing_is_drawn(mine: dict[str, Any]) -> None:
    assert_same_program(run(UnevenTask(), mine), run(UnevenTask(), layout()), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "floor"), [("fp32", 1e-5), ("bf16", 3e-2)])
def test_other_precisions_agree_to_their_floor(precision: str, floor: float) -> None:
    task = UnevenTask(UnevenTask.Config(dropout=0.2))
    alone = run(task, ONE, precision)
    assert {value.dtype for value in alone.parameters.values()} == {np.dtype(np.float32)}
    assert_same_program(run(task, layout(4, "hsdp", shards=2, micro_batch=3), precision), alone, floor)
    if precision == "bf16":  # it is no fp32
        assert abs(run(task, ONE, "fp32").losses[0] / alone.losses[0] - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [None, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("layout", MANY.values(), ids=MANY)
def test_a_transformer_is_the_same_on_every_layout(layout: dict[str, Any], optimizer: Any) -> None:
    task = TransformerTask(TransformerTask.Config(dropout=0.1))
    groups = {"optim": optimizer} if optimizer else {}
    mine, alone = run(task, layout, **groups), run(task, ONE, **groups)
    if optimizer:  # a bias of keys has no gradient but rounding, which AdamW makes steps of
        for part in (mine, alone):
            for kind in (part.parameters, part.average):
                for name in [name for name in kind if name.endswith("key_proj.bias")]:
                    del kind[name]
    assert_same_program(mine, alone, 1e-12 if not optimizer else 1e-10)
