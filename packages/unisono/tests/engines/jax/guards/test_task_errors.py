"""Errors of a task's own code under JAX: one sentence, its line, what to do, and none of JAX's frames."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from packages.unisono.tests.jax_runs import configuration, layout, trace
from packages.unisono.tests.jax_tasks import LinearTask
from unisono.engines.jax.guards.compilation import Compiler, ProgramKey
from unisono.runtime.errors import ConfigError
from unisono.task import Context, Loss


class Shapes(LinearTask):
    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return batch["x"] @ model["weight"].T


class Branch(LinearTask):
    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        made = super().outputs(model, batch, context)
        return made if made.sum() > 0 else -made


class ByNumPy(LinearTask):
    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return jnp.asarray(np.tanh(batch["x"])) @ model["weight"]


class Masked(LinearTask):
    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return batch["x"][batch["x"][:, 0] > 0] @ model["weight"]


class Keeping(LinearTask):
    kept: Any = None

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        made = super().outputs(model, batch, context)
        made, self.kept = made if self.kept is None else made + self.kept.mean(), made
        return made


class Reducing(LinearTask):
    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        return Loss({"square": jax.lax.psum(super().loss(outputs, batch, context).sums["square"], "batch")})


class Unbuilt(LinearTask):
    def build(self, key: jax.Array) -> Any:
        return {"weight": jnp.ones((3, 1)) @ jnp.ones((3, 1))}


class Keyless(LinearTask):
    def build(self) -> Any:  # type: ignore[override]
        return {}


class Raising(LinearTask):
    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        return self.deep(batch)

    def deep(self, batch: Any) -> Loss:
        return Loss({"square": batch["target"]})


TOLD = {
    Shapes: ("TypeError: dot_general", 'in outputs: return batch["x"] @ model["weight"].T', ""),
    Branch: ("TracerBoolConversionError: Attempted boolean conversion", "in outputs: return made if", "jnp.where"),
    ByNumPy: ("TracerArrayConversionError", "in outputs: return jnp.asarray(np.tanh", "use jax.numpy"),
    Masked: ("NonConcreteBooleanIndexError", 'in outputs: return batch["x"][', "multiply by the mask"),
    Reducing: ("NameError: Found an unbound axis name: batch", "in loss: return Loss(", "cross_sample"),
    Unbuilt: ("TypeError: dot_general", 'in build: return {"weight": ', ""),
    Raising: ("KeyError: 'target'", 'in deep: return Loss({"square": batch["target"]})', ""),
}


@pytest.mark.parametrize("micro_batch", [4, 1])
@pytest.mark.parametrize("kind", TOLD, ids=lambda kind: kind.__name__)
def test_an_error_of_the_task_has_its_line_and_what_to_do(kind: type[LinearTask], micro_batch: int) -> None:
    what, line, advice = TOLD[kind]
    with pytest.raises(ConfigError) as raised:
        trace(kind(), configuration(layout=layout(micro_batch=micro_batch), train={"global_batch": 8, "steps": 1}))
    text = str(raised.value)
    assert text.startswith(f"{kind.__name__} failed while JAX traced it: {what}") and len(text.splitlines()) < 6
    assert "test_task_errors.py:" in text and line in text and advice in text
    assert "site-packages" not in text


def test_an_array_that_is_kept_from_an_earlier_call_is_named() -> None:
    """JAX itself takes it for one more argument of the compiled step, and says so."""
    with (
        mock.patch("packages.unisono.tests.jax_runs.raw_gradients"),
        pytest.raises(ConfigError, match=r"used an array of an earlier call; keep no array in self"),
    ):
        trace(Keeping(), configuration(layout=layout(), train={"global_batch": 8, "steps": 2}))


def test_methods_of_another_signature_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"Keyless.build\(\) takes 1 .*, but JAX tasks are called as build\(self, key"
    ):
        trace(Keyless(), configuration(layout=layout(), train={"global_batch": 8, "steps": 1}))


def test_a_host_callback_that_fails_is_named() -> None:
    class Calling(LinearTask):
        def outputs(self, model: Any, batch: Any, context: Context) -> Any:
            def call(step: Any) -> Any:
                if step == 2:
                    raise RuntimeError("the table has no such row")
                return np.float32(0)

            like = jax.ShapeDtypeStruct((), jnp.float32)
            return super().outputs(model, batch, context) + jax.pure_callback(call, like, context.step)

    with pytest.raises(ConfigError, match=r"step 3: a callback of the task to Python failed: RuntimeError: the table"):
        trace(Calling(), configuration(layout=layout(), train={"global_batch": 8, "steps": 4}))


def test_a_sum_over_padding_rows_is_refused_where_the_last_row_counts_nothing() -> None:
    """A mean in the loss is right for full batches, and wrong for a short one."""

    class Mean(LinearTask):
        def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
            real = batch["real"]  # not that of the last row
            return Loss({"square": (super().loss(outputs, batch, context).sums["square"] * real).mean() * len(real)})

        def collate(self, samples: Any) -> Any:
            batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
            return {**batch, "real": np.arange(len(samples)) != len(samples) - 1}

    with pytest.raises(ConfigError, match=r"returns a term \('square'\) that counts padding rows of a short batch"):
        trace(Mean(), configuration(layout=layout(), train={"global_batch": 8, "steps": 1}))


def test_processes_whose_batches_differ_in_shape_are_told_so() -> None:
    """They would run different programs; their code is not the reason."""
    communicator = mock.Mock(size=2, rank=0)
    communicator.gather = lambda mine, what: [mine, ["another", "'tokens' is int32 (1, 2, 4, 9)"]]
    key = ProgramKey("the step", (("tokens", (1, 2, 4, 7), "int32"),))
    with pytest.raises(ConfigError, match=r"int32 \(1, 2, 4, 7\) on rank 0, and .* 9\) on rank 1.*pad to a fixed"):
        Compiler(communicator).get(key, lambda: jax.jit(jnp.sin), jnp.ones(3))
