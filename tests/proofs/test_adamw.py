"""AdamW divides by the size of gradients, so it turns rounding into steps wherever the true gradient is zero.

Therefore it is compared in two ways: on identical gradients, where every layout must make the same update, and as a
trajectory, where the tensors without a true gradient are named, shown to have been moved by rounding, and left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests import processes
from tests.runs import ADAMW, Recording, Trace, configuration, distance, traces
from tests.tasks import TransformerTask
from unisono.config.split import Split
from unisono.data.loader import Loader
from unisono.data.order import Order, Plan
from unisono.place import Group, Place

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "ddp×4": (4, {"strategy": "ddp"}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
}
OTHERS = [name for name in LAYOUTS if name != "single"]
EPSILON = {"fp64": 2.2e-16, "fp32": 1.2e-7}
NO_TRUE_GRADIENT = {"blocks.0.attention.key.bias", "blocks.1.attention.key.bias"}


def _config(layout: str, precision: str = "fp64") -> Any:
    world, settings = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, "micro_batch": 3, **settings},
        train={"epochs": (10 * 12 - 7) / 27, "precision": precision},
        optim=ADAMW,
    )


def _run(layout: str, function: Any, *arguments: Any) -> Any:
    world = LAYOUTS[layout][0]
    if world == 1:
        return processes.alone(function, *arguments)
    return processes.run(function, world, *arguments)[0]


def given_gradients(place: Place, group: Group, config: Any) -> dict[str, np.ndarray]:
    """Parameters after five updates whose gradients are given, not computed."""
    task = TransformerTask()
    source = task.data()
    split = Split.of(12, place.world_size, 3)
    loader = Loader(task, source, Plan(Order(len(source), 0), 12, 24), split, place.rank)
    engine = Recording(task, config, place, group, split)
    try:
        engine.setup(next(iter(loader.steps())), {"lr": 1e-2})
        rng = np.random.default_rng(5)
        for step in range(5):
            for parameter in engine._step.model.parameters():
                gradient = torch.from_numpy(rng.normal(size=tuple(parameter.shape)) * rng.choice([1e-8, 1e-3, 1.0]))
                if isinstance(parameter, DTensor):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
            engine._update(step, {"lr": 1e-2})
        return engine.parameters()
    finally:
        loader.close()
        engine.close()


@pytest.mark.parametrize("layout", OTHERS)
def test_identical_gradients_make_identical_updates(layout: str) -> None:
    reference = _run("single", given_gradients, _config("single"))
    mine = _run(layout, given_gradients, _config(layout))
    assert len(reference) > 20
    worst = distance(mine, reference)
    assert max(worst.values()) < 1e-15, max(worst, key=worst.__getitem__)


@pytest.fixture(scope="module", params=["fp64", "fp32"])
def reference(request: pytest.FixtureRequest) -> tuple[str, Trace]:
    (trace,) = processes.alone(traces, [(TransformerTask(), _config("single", request.param))])
    assert all(np.any(trace.before[name] != value) for name, value in trace.parameters.items())
    return request.param, trace


@pytest.mark.parametrize("layout", OTHERS)
def test_trajectories_agree_where_there_is_a_gradient(reference: tuple[str, Trace], layout: str) -> None:
    precision, one = reference
    (mine,) = _run(layout, traces, [(TransformerTask(), _config(layout, precision))])
    floor = {"fp64": 1e-12, "fp32": 1e-5}[precision]
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in one.gradients.values()))
    without = {
        name for name, gradient in one.gradients.items() if np.linalg.norm(gradient) < 1e2 * EPSILON[precision] * whole
    }
    assert without == NO_TRUE_GRADIENT
    assert mine.losses == pytest.approx(one.losses, rel=floor)
    worst = distance(mine.parameters, one.parameters)
    by_rounding = {name: worst.pop(name) for name in without}
    assert max(by_rounding.values()) > floor, "nothing was amplified, so leaving it out would hide something"
    assert max(worst.values()) < floor, max(worst, key=worst.__getitem__)
