"""Faults of distributed training in JAX, each a small change of a correct task or of the engine; see
`tests.proofs.zoo.faults`.

What JAX or the engine makes impossible is not here; `docs/jax.md` lists it, and `test_prevented.py` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from packages.unisono.tests.jax_tasks import UnevenTask
from tests.proofs.zoo import faults, making
from tests.proofs.zoo.making import nothing, wrapping
from unisono.data.loading.loader import Loader
from unisono.engines import rules
from unisono.engines.jax import step
from unisono.engines.jax.engine import JaxEngine
from unisono.engines.jax.forward import Inputs
from unisono.engines.jax.parallel import mesh
from unisono.engines.jax.programs import Programs
from unisono.task import Context, Loss, Task

ROWS = 8  # of a global batch


class Spread(UnevenTask):
    """It has a term that no row has alone, over all rows of the batch."""

    cross_sample = "whole"

    def shared(self, batch: Any) -> Any:
        return batch

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        loss = super().loss(outputs, batch, context)
        rows = context.valid.sum()
        mean = jnp.where(context.valid[:, None], outputs, 0).sum(0) / rows
        apart = jnp.where(context.valid, jnp.square(outputs - mean).sum(1), 0).sum() / rows
        sums = {name: jnp.where(context.valid, value, 0).sum() for name, value in loss.sums.items()}
        return Loss({**sums, "apart": apart * rows}, weights=loss.weights)

    def counts(self, batch: Any) -> dict[str, float]:
        return {**super().counts(batch), "apart": float(len(batch["x"]))}


class SpreadOfShard(Spread):
    """The same of the rows that a device has."""

    cross_sample = None  # type: ignore[assignment]

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        loss, valid = super().loss(outputs, batch, context), context.valid
        return replace(loss, sums={name: valid * value / valid.sum() for name, value in loss.sums.items()})


class NormedByShard(UnevenTask):
    """It subtracts the mean of the rows that a device has, as a batch norm does."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        made = super().outputs(model, batch, context)
        return made - made.mean(0)


class MeanOfMicroBatch(UnevenTask):
    """It divides by the targets of its own rows."""

    def counts(self, batch: Any) -> dict[str, float]:
        return dict.fromkeys(super().counts(batch), 1.0)

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        loss = super().loss(outputs, batch, context)
        own = jnp.where(context.valid, batch["real"].sum(1), 0).sum()
        rows = context.valid.sum()
        return replace(
            loss, sums={"near": loss.sums["near"] / jnp.maximum(own, 1), "size": loss.sums["size"] / rows}, metrics={}
        )


class KeyOfDevice(UnevenTask):
    """Its key is folded with the number of the device."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        assert context.key is not None
        return super().outputs(model, batch, replace(context, key=jax.random.fold_in(context.key, device())))


class KeyOfProcess(UnevenTask):
    """Its key is folded with the number of the process."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        key = jax.random.fold_in(context.key, jax.process_index())
        return super().outputs(model, batch, replace(context, key=key))


class WeightsOfProcess(UnevenTask):
    """Its first weights are drawn by the number of the process."""

    def build(self, key: jax.Array) -> Any:
        return super().build(jax.random.fold_in(key, jax.process_index()))


class WeightsWithoutKey(UnevenTask):
    """Its first weights come from a generator that nobody has seeded."""

    def build(self, key: jax.Array) -> Any:
        rng = np.random.default_rng()
        return jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype(np.float32), super().build(key))


def device() -> Any:
    """The number of the device; 0 outside of the mesh, where the engine looks at a function by itself."""
    try:
        return mesh.device_index()
    except NameError:
        return 0


TASKS: dict[str, Callable[[], Task]] = {
    "uneven": UnevenTask,
    "dropout": lambda: UnevenTask(UnevenTask.Config(dropout=0.25)),
    "spread": Spread,
    "spread of shards": SpreadOfShard,
    "normed by shard": NormedByShard,
    "mean of micro-batch": MeanOfMicroBatch,
    "key of device": lambda: KeyOfDevice(UnevenTask.Config(dropout=0.25)),
    "key of process": lambda: KeyOfProcess(UnevenTask.Config(dropout=0.25)),
    "weights of process": WeightsOfProcess,
    "weights without key": WeightsWithoutKey,
}


@dataclass(frozen=True)
class Fault(making.Fault):
    """One fault of the zoo in JAX.

    Attributes:
        whole: whether a process has its rows in one micro-batch, and the reference all rows in one.
    """

    task: str = "uneven"
    whole: bool = False


FAULTS: dict[str, Fault] = {}
fault = making.collector(FAULTS, Fault)


def of_task(name: str, task: str, named: str, **more: Any) -> None:
    """A fault of a task."""
    FAULTS[name] = Fault(nothing, named, task, **more)


# sums and means -------------------------------------------------------------------------------------------------------


@fault("pmean of each device's mean", "A mean of means")
def mean_of_means() -> Iterator[None]:
    def scales(original: Any, forward: Any, batch: Any) -> Any:
        own = dict(zip(forward.names.terms, batch.counts.sum(0), strict=True))
        return {name: scale / 2 for name, scale in rules.loss_scales(own, 1.0, jnp.where).items()}

    with wrapping(step, "scales", scales):
        yield


of_task("a mean in loss()", "mean of micro-batch", "A mean of means", whole=True, twin="uneven")


@fault("psum left out under shard_map", "Gradients are not synchronised")
def without_psum() -> Iterator[None]:
    with wrapping(mesh, "sum_gradients", lambda original, own, *more: (own, original(own, *more)[1])):
        yield


@fault("psum where pmean was meant", "All gradients are scaled by N")
def sum_for_mean() -> Iterator[None]:
    def doubled(original: Any, *given: Any) -> Any:
        sums, reports = original(*given)
        return {name: 2 * value for name, value in sums.items()}, reports

    with wrapping(mesh, "sum_gradients", doubled):
        yield


@fault("psum in bf16", "Gradients are reduced in a lower precision")
def bf16_psum() -> Iterator[None]:
    def rounded(original: Any, gradients: Any, *more: Any) -> Any:
        return original({n: g.astype(jnp.bfloat16).astype(g.dtype) for n, g in gradients.items()}, *more)

    with wrapping(mesh, "sum_gradients", rounded):
        yield


of_task(
    "a statistic of the local shard in loss()", "spread of shards", "A statistic of the batch is taken of its parts",
    whole=True, twin="spread",
)  # fmt: skip
of_task("a statistic of the local shard in outputs()", "normed by shard", "", whole=True, mark="ABSTAIN", twin="uneven")


# randomness and data --------------------------------------------------------------------------------------------------


@fault("one key on every device", "The forward pass depends on the layout", task="dropout")
def one_key() -> Iterator[None]:
    def key(original: Any, self: Inputs, number: Any, training: bool) -> Any:
        return original(self, number % 2, training)  # of the pass, and not of the global batch

    with wrapping(Inputs, "key", key):
        yield


of_task("keys by device", "key of device", "The forward pass depends on the layout", twin="dropout")
of_task("keys by process index", "key of process", "Processes have different programs", twin="dropout")


fault("every process feeds the same rows", "Every rank reads the same rows", Loader, "__init__")(faults.same_data)


# state ----------------------------------------------------------------------------------------------------------------

of_task("weights by process index", "weights of process", "Initialisation depends on the rank", twin="uneven")
of_task("weights without a key", "weights without key", "Initialisation depends on the rank", twin="uneven")


@fault("the buffer from before the donation", "The forward pass depends on the layout")
def stale_buffer() -> Iterator[None]:
    """The second update begins with the arrays that the first one was given, not with those that it has made."""
    seen: list[Any] = []

    def program(original: Any, self: Programs, state: Any, *given: Any) -> Any:
        made, columns = original(self, state, *given)

        def stale(before: Any, *rest: Any) -> Any:
            seen.append(before.parameters)
            return made(replace(before, parameters=seen[-2]) if len(seen) == 3 else before, *rest)

        return stale, columns

    with wrapping(Programs, "step", program):
        yield


@fault("a checkpoint of the buffers from before the donation", "The state was not carried on", resumed=True)
def stale_checkpoint() -> Iterator[None]:
    before: list[Any] = []

    def one(original: Any, self: JaxEngine, *given: Any) -> Any:
        before[:] = [self.held.state]
        return original(self, *given)

    def state(original: Any, self: JaxEngine) -> Any:
        now, self.held.state = self.held.state, before[0]
        try:
            return original(self)
        finally:
            self.held.state = now

    with wrapping(JaxEngine, "step", one), wrapping(JaxEngine, "state", state):
        yield


REFERENCES: Mapping[str, Fault] = {
    reference: replace(one, made=nothing, strategy="single", resumed=False)
    for one in [*FAULTS.values(), *(fault.clean for fault in FAULTS.values())]
    for reference in [f"single {one.task}{' whole' * one.whole}"]
}
