"""Every optimizer makes the same run on every layout, with parameter groups, skipped weight decay and all.

Adaptive optimizers turn rounding into steps wherever the true gradient is zero. Therefore they are compared in two
ways: on identical gradients, where every layout must make the same update, and as a trajectory, where the tensors
without a true gradient are named, shown to have been moved by rounding, and left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from packages.unisono.tests import processes
from packages.unisono.tests.runs import ADAMW, Trace, configuration, distance, engine_of, parameters, trace
from packages.unisono.tests.tasks import TransformerTask
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.loader import Loader
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
}
GROUPS = [{"match": "*.norms.*", "lr_scale": 0.5}, {"match": "blocks.1.*.weight", "weight_decay": 0.2}]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "lion": {"kind": "lion", "lr": 1e-3},
    "adam_atan2": {"kind": "adam_atan2", "lr": 1e-2},
    "adafactor": {"kind": "adafactor", "lr": 1e-2, "weight_decay": 0.01},
    "muon": {"kind": "muon", "lr": 1e-2},
    "muon and lion": {
        "kind": "muon", "lr": 1e-2, "adjust_lr": "original", "nesterov": False, "groups": GROUPS,
        "rest": {"kind": "lion", "lr": 1e-3},
    },
}  # fmt: skip
OTHERS = [name for name in LAYOUTS if name != "single"]
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
TRAJECTORIES = [(layout, "fp64") for layout in OTHERS] + [("fsdp×2", "fp32")]
EPSILON = {"fp64": 2.2e-16, "fp32": 1.2e-7}
NO_TRUE_GRADIENT = {"blocks.0.attention.key.bias", "blocks.1.attention.key.bias"}


@dataclass
class Runs:
    """What an optimizer made on a layout: of given gradients, and of its own in every precision."""

    pending: dict[str, np.ndarray]
    traces: dict[str, Trace]


def everything(place: ProcessInfo, group: Communicator, layout: str) -> dict[str, Runs]:
    world, settings = LAYOUTS[layout]
    result = {}
    for name, optim in OPTIMIZERS.items():
        configs = {
            precision: configuration(
                layout={"world_size": world, "micro_batch": 3, **settings},
                train={"epochs": (10 * 12 - 7) / 27, "precision": precision},
                optim=optim,
            )
            for precision in TOLERANCE
        }
        own = {
            precision: trace(place, group, TransformerTask(), config)
            for precision, config in configs.items()
            if layout == "single" or (layout, precision) in TRAJECTORIES
        }
        result[name] = Runs(given_gradients(place, group, configs["fp64"]), own)
    return result


def given_gradients(place: ProcessInfo, group: Communicator, config: Any) -> dict[str, np.ndarray]:
    """Parameters after five updates whose gradients are given, not computed."""
    task = TransformerTask()
    source = task.data()
    split = BatchSplit.create(12, place.world_size, 3)
    loader = Loader(task, source, StreamPlan(Order(len(source), 0), 12, 24), split, place.rank)
    engine = engine_of(task, config, place, group, split)
    try:
        engine.setup(next(iter(loader.steps())), {"lr": config.optim.lr})
        rng = np.random.default_rng(5)
        for step in range(5):
            for parameter in engine.view.module.parameters():
                gradient = torch.from_numpy(rng.normal(size=tuple(parameter.shape)) * rng.choice([1e-8, 1e-3, 1.0]))
                if isinstance(parameter, DTensor):
                    gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
                parameter.grad = gradient
            engine.train_state.update(step, {"lr": config.optim.lr})
        return parameters(engine)
    finally:
        loader.close()
        engine.close()


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Runs]]:
    made = {layout: processes.run(everything, LAYOUTS[layout][0], layout)[0] for layout in OTHERS}
    return {"single": processes.alone(everything, "single"), **made}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", OTHERS)
def test_identical_gradients_make_identical_updates(runs: dict[str, dict[str, Runs]], layout: str, name: str) -> None:
    mine, reference = runs[layout][name], runs["single"][name]
    assert len(reference.pending) > 20
    before = reference.traces["fp64"].before
    assert all(np.any(before[name] != value) for name, value in reference.pending.items())
    worst = distance(mine.pending, reference.pending)
    assert max(worst.values()) < 1e-15, max(worst, key=worst.__getitem__)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("layout", "precision"), TRAJECTORIES)
def test_trajectories_agree_where_there_is_a_gradient(
    runs: dict[str, dict[str, Runs]], layout: str, precision: str, name: str
) -> None:
    mine, one = runs[layout][name].traces[precision], runs["single"][name].traces[precision]
    floor = TOLERANCE[precision]
    assert len(set(one.losses)) == 10 and one.losses[-1] < one.losses[0]
    assert all(np.any(one.before[name] != value) for name, value in one.parameters.items())
    assert mine.rows == one.rows
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in one.gradients.values()))
    without = {
        name for name, gradient in one.gradients.items() if np.linalg.norm(gradient) < 1e2 * EPSILON[precision] * whole
    }
    assert without == NO_TRUE_GRADIENT
    assert mine.losses == pytest.approx(one.losses, rel=floor)
    assert mine.norms == pytest.approx(one.norms, rel=floor)
    worst = distance(mine.parameters, one.parameters)
    by_rounding = {name: worst.pop(name) for name in without}
    # Lion adds signs, so its parameters keep the very bits of the other layout until a sign differs.
    amplified = max(by_rounding.values()) > floor or max({**worst, **by_rounding}.values()) == 0.0
    assert amplified, "nothing was amplified, so leaving it out would hide something"
    assert max(worst.values()) < floor, max(worst, key=worst.__getitem__)
    assert mine.evaluation == pytest.approx(one.evaluation, rel=floor)
