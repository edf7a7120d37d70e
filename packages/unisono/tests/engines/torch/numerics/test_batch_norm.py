"""Batch statistics of all processes are those of one process that has all rows, whatever part of them each has."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import FirstGradients, configuration, distance, parameters, started, whole
from packages.unisono.tests.tasks import LinearTask
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.loader import Loader
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.engines.torch.numerics.batch_norm import BatchStatistics
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError

FLOOR = 1e-12

# layers ---------------------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.BatchNorm1d(3), ()),
    "1d with a length": (nn.BatchNorm1d(3), (5,)),
    "2d": (nn.BatchNorm2d(3), (2, 4)),
    "3d": (nn.BatchNorm3d(3), (2, 1, 3)),
    "cumulative": (nn.BatchNorm1d(3, momentum=None), ()),
    "without weights": (nn.BatchNorm2d(3, affine=False), (2, 2)),
    "without running statistics": (nn.BatchNorm1d(3, track_running_stats=False), ()),
}
PARTS = ((5, 2), (1, 6), (7, 0))  # rows of each of two processes; what has none computes others, which do not count


def data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Seven rows whose variance is small beside their mean, and what the outputs of two passes are weighted with."""
    rng = torch.Generator().manual_seed(3)
    x, *weights = (torch.randn(7, 3, *shape, dtype=torch.float64, generator=rng) for _ in range(3))
    return x + 100.0, torch.stack(weights)


def layer_of(name: str) -> nn.Module:
    module = copy.deepcopy(LAYERS[name][0]).double()
    for number, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(torch.tensor([1.5, -2.0, 0.25]) + number)
    return module


def used(module: nn.Module, x: Tensor, weights: Tensor) -> dict[str, np.ndarray]:
    """What two passes leave behind: the second one's output and gradients, and the state."""
    for part in weights:
        x = x.detach().requires_grad_()
        module.zero_grad()
        made = module(x)
        (made.square() * part).sum().backward()
    assert x.grad is not None
    result = {"output": made, "gradient": x.grad, **dict(module.named_buffers())}
    result |= {f"gradient of {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: value.detach().numpy().copy() for name, value in result.items()}


def on_two(place: ProcessInfo, group: Communicator) -> list[Any]:
    told = []
    for name, (_, shape) in LAYERS.items():
        for parts in PARTS:
            x, weights = data(shape)
            first = sum(parts[: place.rank])
            own = slice(first, first + parts[place.rank])
            layer = layer_of(name)
            statistics = BatchStatistics(layer, 2)
            statistics.idle = parts[place.rank] == 0
            told.append(
                used(layer, x[:2] * 7, weights[:, :2] * 0) if statistics.idle else used(layer, x[own], weights[:, own])
            )
    return told


def test_a_layer_computes_on_two_processes_what_it_computes_on_one() -> None:
    first, second = processes.run(on_two, 2)
    cases = [(name, parts) for name in LAYERS for parts in PARTS]
    for (name, parts), mine, theirs in zip(cases, first, second, strict=True):
        x, weights = data(LAYERS[name][1])
        alone = used(layer_of(name), x, weights)
        local = used(layer_of(name), x[: parts[0]], weights[:, : parts[0]]) if 1 < parts[0] < 7 else None
        told = f"{name}, {parts}"
        both = {}
        for key, value in mine.items():
            if key in ("output", "gradient"):
                both[key] = np.concatenate([value, theirs[key][: parts[1]]])
            elif key.startswith("gradient of"):
                both[key] = value + theirs[key]
            else:
                assert np.array_equal(value, theirs[key]), f"{told}: {key} differs between processes"
                both[key] = value
        assert max(distance(both, alone).values()) < FLOOR, told
        if local is not None:
            assert np.abs(local["output"] - alone["output"][: parts[0]]).max() > 1e-2, "else nothing is shown"
        if not parts[1]:
            assert np.abs(theirs["gradient"]).max() == 0, f"{told}: rows that do not count got a gradient"


def test_parameters_buffers_and_evaluation_are_those_of_a_layer_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    statistics = BatchStatistics(model, 2)  # never asked: a layer that evaluates has nothing to exchange
    assert list(model.state_dict()) == list(before)
    assert isinstance(model[1], nn.BatchNorm1d)
    assert statistics.layers == {"1"}
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    plain.load_state_dict(before)
    x = torch.randn(4, 3)
    assert torch.equal(model.eval()(x), plain(x))


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_layer_with_a_forward_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="the layer '1' is a Own, whose forward is not that of torch's"):
        BatchStatistics(nn.Sequential(nn.Linear(3, 3), Own(3)), 2)


# runs -----------------------------------------------------------------------------------------------------------------


class Normed(LinearTask):
    """Batch norms on the rows, and inside; with a branch that FSDP gathers by itself."""

    def build(self) -> nn.Module:
        inner = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), *inner, nn.Tanh(), nn.Linear(4, 1))

    def held_out(self) -> Any:
        return self.data()[:9]


def run(place: ProcessInfo, group: Communicator, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of three full batches and a short one, whose rows do not go round."""
    told = []
    for layout in layouts:
        config = configuration(
            layout={"world_size": place.world_size, **layout},
            train={"epochs": 1, "global_batch": 12, "precision": "fp64", "guard_every": 1},
        )
        task = Normed()
        engine, steps = started(place, group, task, config)
        split = BatchSplit.create(12, place.world_size, config.layout.micro_batch)
        first = FirstGradients(engine.view)
        engine.observe(first)
        results = [engine.step(batches, number, {"lr": 0.05}) for number, batches in enumerate(steps)]
        held_out = Loader(task, task.held_out(), StreamPlan.create(Order(9, 0), 12, None, 1), split, place.rank)
        evaluated = engine.evaluate(held_out.steps(), len(steps), {})
        told.append(
            {
                "gradients": first.raw,
                "parameters": parameters(engine),
                "buffers": {name: whole(b) for name, b in engine.view.module.named_buffers()},
                "numbers": [value for r in results for value in (r.loss, r.grad_norm)] + [evaluated.loss],
                "rows": [sum(len(m.rows) for m in batches if not m.idle) for batches in steps],
                "random": engine.random,
                "saved": sorted(piece.name for piece in engine.state()),
            }
        )
        engine.close()
    return told


SYNCHRONISED = {"sync_batch_norm": True}


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    (alone,) = processes.alone(run, [SYNCHRONISED])
    strategies = ("ddp", "fsdp")
    layouts = [{"strategy": strategy, **SYNCHRONISED} for strategy in strategies]
    layouts += [{"strategy": strategy, "activation_checkpointing": 1, **SYNCHRONISED} for strategy in strategies]
    layouts += [{"strategy": "ddp"}, {"strategy": "ddp", "micro_batch": 2, **SYNCHRONISED}]
    ranks = processes.run(run, 2, layouts)
    names = (*strategies, "ddp recomputed", "fsdp recomputed", "local", "accumulated")
    return {"alone": alone, **{name: [rank[number] for rank in ranks] for number, name in enumerate(names)}}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp recomputed", "fsdp recomputed"])
def test_a_run_with_batch_norm_on_two_processes_is_that_of_one(made: dict[str, Any], strategy: str) -> None:
    alone = made["alone"]
    assert [rank["rows"] for rank in made[strategy]] == [[6, 6, 6, 4], [6, 6, 6, 0]], "the last batch has four rows"
    for mine in made[strategy]:
        for what in ("gradients", "parameters", "buffers"):
            assert max(distance(mine[what], alone[what]).values()) < FLOOR, what
        assert mine["numbers"] == pytest.approx(alone["numbers"], rel=FLOOR)
        assert not mine["random"], "the rows of a micro-batch are no part of the mathematics"
    assert {name for mine in made[strategy] for name in mine["saved"]} == set(alone["saved"]), (
        "a checkpoint is the same"
    )
    assert any(name.startswith("rank-1/") for name in made["local"][1]["saved"]), "else nothing is shown"


def test_without_the_switch_the_same_run_is_another(made: dict[str, Any]) -> None:
    mine, alone = made["local"][0], made["alone"]
    for what in ("gradients", "parameters", "buffers"):
        assert max(distance(mine[what], alone[what]).values()) > 1e-3, what
    assert mine["random"]


def test_passes_that_some_or_all_processes_have_no_rows_for_are_made_and_change_nothing(made: dict[str, Any]) -> None:
    first, second = made["accumulated"]
    assert first["rows"] == [6, 6, 6, 4]
    for name, value in first["buffers"].items():
        assert np.isfinite(value).all()
        assert np.array_equal(value, second["buffers"][name])
    # Three passes a step; in the fourth step the second process is idle, and in the last pass of it both are.
    assert first["buffers"]["0.num_batches_tracked"] == 11
    assert max(distance(first["buffers"], made["alone"]["buffers"]).values()) > 1e-3


def test_statistics_of_a_part_of_the_batch_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "unisono"):
        processes.alone(run, [SYNCHRONISED])
    assert "batch statistics" not in caplog.text
    with caplog.at_level(logging.WARNING, "unisono"):
        processes.alone(run, [{"micro_batch": 4, **SYNCHRONISED}])
    assert "one of 3 parts of the global batch" in caplog.text
