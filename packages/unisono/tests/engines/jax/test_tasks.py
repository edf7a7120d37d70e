"""What a task can be besides a sum over rows: crossing samples, totals, state of rows, frozen parts, static scalars."""

from __future__ import annotations

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packages.unisono.tests.jax_runs import Trace, configuration, layout, trace
from packages.unisono.tests.jax_tasks import UnevenTask
from packages.unisono.tests.runs import assert_same, distance
from unisono.engines.jax.model import build_structure
from unisono.runtime.errors import ConfigError
from unisono.task import Context, Loss

MANY = [layout(2, "ddp", micro_batch=3), layout(4, "fsdp")]


def run(task: Any, layout: dict[str, Any], **groups: Any) -> Trace:
    train = {"global_batch": 12, "precision": "fp64", **groups.pop("train", {"epochs": 2})}
    return trace(task, configuration(layout=layout, train=train, **groups))


class Pairs(UnevenTask):
    """Distances of all pairs of rows."""

    cross_sample = "rows"

    def counts(self, batch: Any) -> dict[str, float]:
        return {"pair": float(len(batch["x"]))}

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return {"point": super().outputs(model, batch, context)}

    def shared(self, batch: Any) -> dict[str, Any]:
        return {"y": batch["y"]}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        others, rows = context.global_batch.outputs["point"], len(context.global_batch.outputs["point"])
        here = context.global_batch.first + jnp.arange(len(batch["y"]))
        apart = jnp.square(outputs["point"][:, None] - others).sum(-1)
        wanted = jnp.square(batch["y"][:, None] - context.global_batch.batch["y"]).sum(-1)
        error = jnp.square(apart - wanted) * (jnp.arange(rows) != here[:, None])
        return Loss({"pair": error.sum(1) / max(1, rows - 1)})


class Whole(UnevenTask):
    """The size of the covariance of all rows."""

    cross_sample = "whole"

    def counts(self, batch: Any) -> dict[str, float]:
        return {"spread": float(len(batch["x"]))}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        centred = outputs - outputs.mean(0)
        directions = jax.random.normal(context.key, (6, 3), outputs.dtype)
        size = jnp.square((centred @ directions).T @ (centred @ directions) / len(outputs) - jnp.eye(3)).sum()
        return Loss({"spread": size * len(outputs)}, metrics={"seen": (jnp.asarray(1.0 * len(outputs)), jnp.ones(()))})


class Balance(UnevenTask):
    """A product of means: how evenly columns are used, over the whole global batch."""

    needs_totals = True

    def counts(self, batch: Any) -> dict[str, float]:
        return {"balance": float(len(batch["x"]))}

    def totals(self, outputs: Any, batch: Any, context: Context) -> dict[str, Any]:
        chosen = jax.nn.one_hot(outputs.argmax(1), 6) * context.valid[:, None]
        return {"chosen": chosen.sum(0), "rows": context.valid.sum()}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        share = context.totals["chosen"] / context.totals["rows"] if context.training else jnp.ones(6)
        return Loss({"balance": jax.nn.softmax(outputs) @ share})


class Remembering(UnevenTask):
    """Rows carry a running mean of their outputs from step to step."""

    def initial_carry(self, batch: Any) -> dict[str, Any]:
        return {"mean": jnp.zeros((len(batch["x"]), 6), batch["x"].dtype) + batch["y"] * 0.1}

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return super().outputs(model, batch, context) + context.carry["mean"]

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        plain = super().loss(outputs, batch, context)
        after = jax.lax.stop_gradient(0.5 * (context.carry["mean"] + outputs))
        return Loss(plain.sums, plain.weights, plain.metrics, {"mean": after})


class RememberingPairs(Pairs):
    """Both at once."""

    def initial_carry(self, batch: Any) -> dict[str, Any]:
        return {"seen": jnp.zeros(len(batch["x"]), batch["x"].dtype)}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        plain = super().loss(outputs, batch, context)
        weighted = plain.sums["pair"] / (1 + context.carry["seen"])
        return Loss({"pair": weighted}, carry={"seen": context.carry["seen"] + 1})


@pytest.mark.parametrize(
    "kind", [Balance, Remembering, *(pytest.param(k, marks=pytest.mark.slow) for k in (Pairs, Whole, RememberingPairs))]
)
def test_every_kind_of_loss_is_the_same_on_every_layout(kind: Any) -> None:
    task = kind(UnevenTask.Config(dropout=0.2 if kind is not Remembering else 0.0))
    one = run(task, layout(micro_batch=3))
    assert one.losses[0] != one.losses[-1] and min(np.abs(g).max() for g in one.gradients.values()) > 1e-6
    for mine in MANY if kind in (Pairs, Whole) else MANY[:1]:
        assert_same(run(task, mine), one, 1e-11 if kind in (Pairs, RememberingPairs) else 1e-12)


@pytest.mark.parametrize("kind", [Pairs, Whole, Balance])
def test_the_loss_of_the_global_batch_is_what_the_task_says_of_all_rows_at_once(kind: Any) -> None:
    """Held against the plain gradient of the loss of one batch, without any of the engine's machinery."""
    task = kind()
    one = run(task, layout(2, "ddp", micro_batch=3), train={"steps": 1})
    batch = first_batch(task)

    def loss(model: Any) -> jax.Array:
        from unisono.task import GlobalBatch

        context = Context(0, training=True, valid=jnp.ones(12, bool), key=one_key(kind))
        outputs = task.outputs(model, batch, context)
        if kind is Pairs:
            context = Context(0, True, valid=context.valid, global_batch=GlobalBatch(outputs, task.shared(batch), 0))
        if kind is Balance:
            totals = jax.lax.stop_gradient(task.totals(outputs, batch, context))
            context = Context(0, True, valid=context.valid, totals=totals)
        return task.loss(outputs, batch, context).sums[next(iter(task.counts(batch)))].sum() / 12

    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(loss)({name: jnp.asarray(v) for name, v in one.before.items()})
    assert one.losses[0] == pytest.approx(float(value), rel=1e-12)
    assert max(distance(one.gradients, {name: np.asarray(g) for name, g in gradient.items()}).values()) < 1e-12


def first_batch(task: Any) -> dict[str, Any]:
    from unisono.config.batch_split import BatchSplit
    from unisono.data.loading.loader import Loader
    from unisono.data.order.planning import build_plan

    config = configuration(layout=layout(), train={"steps": 1})
    plan = build_plan(task, task.data(), config)
    (micro,) = next(iter(Loader(task, task.data(), plan, BatchSplit.create(12, 1, 12), 0).steps()))
    return {n: np.asarray(a, np.float64) if a.dtype.kind == "f" else a for n, a in micro.arrays.items()}


def one_key(kind: Any) -> Any:
    """The key of a whole loss in step 0, made by its address."""
    from unisono.engines.jax.model import key_from_bits
    from unisono.runtime.rng import key

    return jax.random.fold_in(key_from_bits(key(0, "dropout", "loss")), 0) if kind is Whole else jax.random.key(0)


def test_a_part_that_is_frozen_stays_as_it_was() -> None:
    class Frozen(UnevenTask):
        frozen = ("up",)

    one = run(Frozen(), layout(2, "fsdp"))
    assert one.before.keys() == {"bias", "down"} == one.gradients.keys()
    assert all(not np.array_equal(one.before[name], one.parameters[name]) for name in one.before)
    with pytest.raises(ConfigError, match="'upp' matches no parameter, did you mean 'up'"):
        run(type("Wrong", (UnevenTask,), {"frozen": ("upp",)})(), layout())


def test_a_static_scalar_is_a_python_number_and_a_change_of_it_compiles_again() -> None:
    class Deep(UnevenTask):
        static_scalars = ("depth",)
        seen: ClassVar[list[Any]] = []

        def outputs(self, model: Any, batch: Any, context: Context) -> Any:
            self.seen.append((type(context.scalars["depth"]), isinstance(context.scalars["lr"], jax.Array)))
            made = super().outputs(model, batch, context)
            for _ in range(context.scalars["depth"]):
                made = jnp.tanh(made)
            return made

    task = Deep()
    schedules = {"depth": {"kind": "linear", "peak": 2.0, "floor": 0.0}}
    one = run(task, layout(), schedules=schedules, train={"steps": 4})  # 2, 1.5 (to the even number: 2), 1 and 0.5
    assert one.recompiled == ["", "", "the step: depth is 1, and was 2", "the step: depth is 0, and was 1"]
    assert set(task.seen) == {(int, True)}
    with pytest.raises(ConfigError, match="KeyError: 'depth'"):  # nothing schedules it
        run(task, layout())


def test_the_state_of_a_batch_norm_is_not_trained() -> None:
    class Normed(UnevenTask):
        def build(self, key: jax.Array) -> Any:
            norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(6, "batch", mode="batch")
            return {**super().build(key), "norm": norm, "state": state}

    with pytest.raises(ConfigError, match=r"the model has an equinox.nn.State .* frozen = \('state\.\*',"):
        run(Normed(), layout())
    structure = build_structure(type("Kept", (Normed,), {"frozen": ("state.*",)})(), 0)
    assert structure.trained == {"up", "bias", "down", "norm.weight", "norm.bias"}
