"""Predictions of a JAX run: rows in, a table out, with the scores of the run's own evaluation."""

from __future__ import annotations

import csv
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packages.unisono.tests.engines.jax.test_processes import SPIRALS, train, unisono
from packages.unisono.tests.jax_tasks import TransformerTask, UnevenTask
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.jax.rows import RowForward
from unisono.observe import events
from unisono.task import Context, Task


@pytest.mark.parametrize("task", [UnevenTask(), TransformerTask()], ids=["uneven", "transformer"])
def test_rows_are_computed_as_in_an_evaluation(task: Task) -> None:
    """Outputs and sums of a micro-batch are those of the task's own functions."""
    source = task.held_out()
    assert source is not None
    arrays = task.collate([source[row] for row in range(4)])
    micro = MicroBatch(0, np.arange(4), arrays, task.counts(arrays), {})
    model, key = task.build(jax.random.key(0)), jax.random.key(1)
    outputs, loss = RowForward(task, model, seed=0, kind="fp32", device="auto")(micro, Context(3, training=False))
    context = Context(3, training=False, key=key, valid=jnp.ones(4, bool))
    expected = task.outputs(model, arrays, context)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    assert loss is not None
    for name, value in task.loss(expected, arrays, context).sums.items():
        np.testing.assert_allclose(loss.sums[name], jnp.sum(value), rtol=1e-5)


@pytest.mark.slow
def test_a_jax_run_predicts_with_the_scores_of_its_evaluation(tmp_path: Path) -> None:
    run = train(tmp_path, "a", "train.steps=4", "train.precision=fp32")
    done = unisono(tmp_path, "predict", str(run), "--task", SPIRALS, "micro_batch=64")
    assert done.returncode == 0, done.stderr
    told = dict(line.split(": ") for line in done.stdout.splitlines() if ": " in line)
    evaluation = events.last_evaluation(events.read_events(run / "events.jsonl"))
    assert float(told["loss"]) == pytest.approx(evaluation["loss"], rel=1e-5)
    assert float(told["accuracy"]) == pytest.approx(evaluation["accuracy"], rel=1e-5)
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 500 and {"row", "output", "side"} <= rows[0].keys()
