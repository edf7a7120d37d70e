"""What all processes know before they compute: the kernels, and a loss that is a product of means."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packages.unisono.tests import processes
from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import SGD, Trace, assert_same, configuration, layout, prepared, trace, traces
from packages.unisono.tests.tasks import LinearTask
from unisono.config.schema import Settings
from unisono.config.schema.run import RunConfig
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError, KernelError
from unisono.task import Context, Loss, Task

ROWS = 41
CHOSEN = ("single m6", "single m1", "ddp×2", "ddp×2 m3", "fsdp×2 m3", "hsdp 2×2 m3")


class Products(Task):
    """Rows of different length; the loss is (mean of how many features are on) · (mean of the features)."""

    class Config(Settings):
        dropout: float = 0.0

    def data(self) -> Any:
        rng = np.random.default_rng(2)
        return [{"x": rng.normal(size=8).astype(np.float32), "n": np.float32(rng.integers(0, 5))} for _ in range(ROWS)]

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(self.config.dropout), nn.Linear(16, 6))

    def counts(self, batch: Any) -> dict[str, float]:
        return {"product": float(batch["n"].sum())}

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Tensor:
        result: Tensor = model(batch["x"]).sigmoid()
        return result

    def totals(self, outputs: Tensor, batch: Any, context: Context) -> dict[str, Tensor]:
        return {"on": ((outputs > 0.5) * batch["n"][:, None]).sum(0), "rows": batch["n"].sum()}

    def loss(self, outputs: Tensor, batch: Any, context: Context) -> Loss:
        if not context.training:
            return Loss({"product": outputs.sum(1) @ batch["n"]})
        fractions = context.totals["on"] / context.totals["rows"]
        return Loss({"product": ((outputs @ fractions.to(outputs.dtype)) * batch["n"]).sum()})


class Whole(Products):
    """The same as one process computes it, with all rows at once: without totals."""

    needs_totals = False

    def loss(self, outputs: Tensor, batch: Any, context: Context) -> Loss:
        totals = self.totals(outputs.detach(), batch, context) if context.training else {}
        return super().loss(outputs, batch, Context(0, context.training, totals=totals))


def config(name: str) -> RunConfig:
    world, keys = LAYOUTS[name]
    return configuration(
        layout={"world_size": world, **keys},
        train={"epochs": (3 * 12 + 5) / ROWS, "precision": "fp64", "guard_every": 2, "clip_norm": None},
        optim=SGD,
    )


@pytest.fixture(scope="module")
def whole() -> Trace:
    return processes.alone(trace, Whole(), config("single"))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_product_of_means_is_that_of_the_whole_global_batch(whole: Trace, world: int) -> None:
    names = [name for name in CHOSEN if LAYOUTS[name][0] == world]
    every, *_ = processes.ranks(traces, world, [(Products(), config(name)) for name in names])
    assert len(set(whole.losses)) == 4
    assert all(np.any(gradient) for gradient in whole.gradients.values())
    for mine in every:
        assert_same(mine, whole)


def test_of_micro_batches_alone_it_would_be_another(whole: Trace) -> None:
    mine = processes.alone(trace, Whole(), config("single m3"))
    assert mine.losses[0] != pytest.approx(whole.losses[0], rel=1e-3)


class Remembered(Products):
    """Keeps what both passes saw."""

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Tensor:
        result = super().outputs(model, batch, context)
        seen.append((torch.is_grad_enabled(), bool(context.totals), result.detach().clone()))
        return result


seen: list[tuple[bool, bool, Tensor]] = []


def test_both_passes_of_a_step_draw_the_same_random_numbers() -> None:
    seen.clear()
    processes.alone(trace, Remembered(Remembered.Config(dropout=0.5)), config("single m6"))
    step = seen[2:6]  # after the warm-up's two: two micro-batches, twice
    assert [(grad, known) for grad, known, _ in step] == [(False, False)] * 2 + [(True, True)] * 2
    assert all(torch.equal(first, second) for (_, _, first), (_, _, second) in zip(step[:2], step[2:], strict=True))
    assert not torch.equal(step[0][2], seen[6][2])


def test_a_task_that_needs_totals_must_define_them() -> None:
    class Forgotten(LinearTask):
        needs_totals = True

    with pytest.raises(ConfigError, match=r"Forgotten has needs_totals = True but does not define totals\(\)"):
        processes.alone(trace, Forgotten(), config("single"))


# kernels ----------------------------------------------------------------------------------------------------------


class Choosing(Products):
    """Chooses kernels as it was told for each rank, by the environment variable of its process."""

    def kernels(self, device: str, precision: str) -> dict[str, str]:
        chosen = os.environ["CHOSEN"]
        if chosen == "refused":
            raise KernelError("model.kernel=fast cannot be used: it is not installed")
        return {"kernel": chosen, "told": f"{device} {precision}"}


def setup(place: ProcessInfo, group: Communicator, choices: list[str]) -> Any:
    os.environ["CHOSEN"] = choices[place.rank]
    made = configuration(layout=layout("ddp" if place.world_size > 1 else "single", micro_batch=3))
    engine, steps = prepared(place, group, Choosing(), made)
    try:
        return dict(engine.setup(steps[0], {"lr": 0.1}).kernels)
    except KernelError as error:
        return str(error)
    finally:
        engine.close()


def test_the_kernels_are_told() -> None:
    assert setup(ProcessInfo(), SingleProcess(), ["slow"]) == {"kernel": "slow", "told": "cpu fp32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "told"),
    [
        (["slow", "slow"], None),
        (["slow", "fast"], "rank 0 chose the kernels .*slow.*, rank 1 .*fast.*; install the same packages"),
        (["slow", "refused"], "rank 1: model.kernel=fast cannot be used: it is not installed"),
        (["refused", "refused"], "model.kernel=fast cannot be used: it is not installed"),
    ],
)
def test_ranks_choose_the_same_kernels_or_all_stop(choices: list[str], told: str | None) -> None:
    for answer in processes.run(setup, 2, choices):
        if told is None:
            assert answer == {"kernel": "slow", "told": "cpu fp32"}
        else:
            assert re.match(told, answer), answer
