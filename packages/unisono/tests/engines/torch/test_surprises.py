"""What tasks and models do only later, or only on some ranks: it is made right, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes, runs
from packages.unisono.tests.engines.torch.test_engine import NanRow, outcome
from packages.unisono.tests.runs import configuration, distance, layout, started, trace, whole
from packages.unisono.tests.tasks import LinearTask
from unisono.engines.torch.parallel import wrap
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task import Context, Loss

# buffers that grow ----------------------------------------------------------------------------------------------------


class Positions(nn.Module):
    """A table of positions that grows with the longest rows seen, as those of rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("table", torch.arange(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(float(x.shape[1]), dtype=x.dtype)
        result: torch.Tensor = self.linear(x + self.table[: x.shape[1]])
        return result


class Grown(LinearTask):
    def build(self) -> nn.Module:
        return Positions()

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return model(batch["x"])


def test_a_buffer_that_grows_in_a_forward_pass_is_a_cache() -> None:
    train = {"train": {"steps": 3, "global_batch": 8, "precision": "fp64"}}
    one = processes.alone(trace, Grown(), configuration(**train))
    many = processes.run(trace, 2, Grown(), configuration(layout=layout("ddp", micro_batch=4), **train))[0]
    assert one.losses[0] != one.losses[-1]
    # The bound that the README gives for fp64 on every layout; here they are 2e-16 apart.
    assert many.losses == pytest.approx(one.losses, rel=1e-12)


# parameters that only later steps leave out ---------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all, self.up, self.down = (nn.Linear(3, 1) for _ in range(3))


class Routed(LinearTask):
    """Every expert is used in the first step; then each row chooses one. In the fourth step all choose the same."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        x = batch["x"]
        shared = model.all(x)
        if context.step == 0 and context.training:
            return shared + model.up(x) + model.down(x)
        expert = model.up if bool(x[0, 0] > 0) or context.step == 3 else model.down
        return shared + expert(x)

    def build(self) -> nn.Module:
        return Experts()


ROUTED = {"train": {"steps": 6, "global_batch": 8, "precision": "fp64"}}


@pytest.mark.parametrize(("strategy", "told"), [("fsdp", False), ("ddp", True)])
def test_parameters_that_later_steps_leave_out_are_trained_as_on_one_process(strategy: str, told: bool) -> None:
    one = processes.alone(trace, Routed(), configuration(layout={"micro_batch": 1}, **ROUTED))
    config = configuration(layout=layout(strategy, micro_batch=1, find_unused_parameters=told), **ROUTED)
    many = processes.run(trace, 2, Routed(), config)[0]
    assert max(distance(many.parameters, one.parameters).values()) < 1e-12
    assert many.losses == pytest.approx(one.losses, rel=1e-12)


def test_ddp_that_was_not_told_refuses_them_before_an_update() -> None:
    config = configuration(layout=layout("ddp", micro_batch=1), launch={"timeout": 20}, **ROUTED)
    with pytest.raises(AssertionError, match="did not use parameters that the first pass used"):
        processes.run(trace, 2, Routed(), config)


# names, weights and counts --------------------------------------------------------------------------------------------


class MetricsByRows(LinearTask):
    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        name = "up" if batch["x"][0, 0] > 0 else "down"
        return Loss({"square": (outputs - batch["y"]).square().sum()}, metrics={name: (1.0, 1.0)})


class WeightsByRows(LinearTask):
    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().sum()}, weights={"square": float(batch["x"][0, 0])})


@pytest.mark.parametrize("task", [MetricsByRows, WeightsByRows])
def test_what_depends_on_the_rows_and_must_not_is_refused(task: type[LinearTask]) -> None:
    config = configuration(layout={"micro_batch": 1}, train={"steps": 2, "global_batch": 8})
    with pytest.raises(ConfigError, match="They must not depend on the rows"):
        processes.alone(outcome, task(), config)


def test_ranks_that_report_other_metrics_are_refused() -> None:
    config = configuration(layout=layout("ddp", micro_batch=1), train={"steps": 2, "global_batch": 8})
    with pytest.raises(AssertionError, match="They must not depend on the rows"):
        processes.run(outcome, 2, MetricsByRows(), config)


def test_a_weight_is_a_number() -> None:
    with pytest.raises(ConfigError, match="loss weights must be numbers, not tensors"):
        Loss({"x": torch.tensor(1.0)}, weights={"x": torch.tensor(2.0)})  # type: ignore[dict-item]


# complex numbers ------------------------------------------------------------------------------------------------------


class Rotating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.phase = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0) + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear((x * self.turn * self.phase).imag)


class RotatingTask(LinearTask):
    def build(self) -> nn.Module:
        return Rotating()


def rotated(place: ProcessInfo, group: Communicator, config: Any) -> tuple[torch.dtype, torch.dtype, float, bool]:
    engine, steps = started(place, group, RotatingTask(), config)
    before = whole(engine.view.module.phase)
    for number, batches in enumerate(steps):
        engine.step(batches, number, {"lr": 0.01})
    model = engine.view.module
    imaginary = float(model.turn.imag.abs().max())
    told = model.turn.dtype, model.phase.dtype, imaginary, bool(np.any(whole(model.phase) != before))
    engine.close()
    return told


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.complex64), ("fp64", torch.complex128)])
def test_complex_parameters_and_buffers_stay_complex(precision: str, dtype: torch.dtype) -> None:
    config = configuration(train={"steps": 2, "global_batch": 8, "precision": precision})
    assert processes.alone(rotated, config) == (dtype, dtype, pytest.approx(0.909, abs=1e-3), True)


# batch norm -----------------------------------------------------------------------------------------------------------


class NormedTask(LinearTask):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    def held_out(self) -> Any:
        return self.data()[:7]


class NormedNan(NanRow, NormedTask):
    def held_out(self) -> Any:
        return None


def normed(place: ProcessInfo, group: Communicator, folder: Path, steps: list[int]) -> list[Any]:
    """The evaluation of a run that is made in one go, or continued; and the statistics in its checkpoint."""
    told: list[Any] = []
    folder.mkdir(exist_ok=True)
    config = configuration(
        layout=layout("ddp" if place.world_size > 1 else "single", micro_batch=2),
        train={"steps": 6, "global_batch": 8},
        checkpoint={"every": 3},
        observe={"progress": False},
    )
    for until in steps:
        with runs.training(NormedTask(), config, place, group, folder) as training:
            for result in training.steps():
                if until == 3:
                    told.append(result.loss)
                    if len(told) == 3:
                        break
            told.append(dict(training.evaluated))
    saved = {name: value.tolist() for name, value in runs.saved_arrays(folder).items() if "running" in name}
    return [told[-1], runs.newest(folder).state["random"], saved]


def test_a_run_with_batch_norm_goes_on_on_fewer_processes(tmp_path: Path) -> None:
    """With the statistics of the first process, which a checkpoint has beside those of each."""
    processes.run(normed, 2, tmp_path / "cut", [3])
    evaluated, _, saved = processes.alone(normed, tmp_path / "cut", [6])
    assert np.isfinite(evaluated["loss"]) and set(saved) == {"model/0.running_mean", "model/0.running_var"}


def test_a_run_with_batch_norm_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole_run = processes.run(normed, 2, tmp_path / "whole", [6])[0]
    continued = processes.run(normed, 2, tmp_path / "cut", [3, 6])[0]
    assert whole_run[0]["loss"] > 0
    assert continued == whole_run
    _, random, saved = whole_run
    assert random, "the micro-batch is part of what a batch norm computes"
    for kind in ("running_mean", "running_var"):
        assert saved[f"model/0.{kind}"] == saved[f"rank-0/0.{kind}"] != saved[f"rank-1/0.{kind}"]


def test_a_row_that_is_not_a_number_is_told_beside_a_batch_norm() -> None:
    config = configuration(layout={"micro_batch": 4}, train={"epochs": 1, "global_batch": 8})
    kind, text, _, _ = processes.alone(outcome, NormedNan(), config)
    assert kind == "NonFiniteError"
    assert "17" in text


# carries --------------------------------------------------------------------------------------------------------------


class Counting(LinearTask):
    """Each row of the batch carries the number of steps it has seen."""

    def initial_carry(self, batch: Any) -> Any:
        return {"seen": torch.zeros(len(batch["x"]))}

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        assert context.carry is not None
        return Loss({"square": (outputs - batch["y"]).square().sum()}, carry={"seen": context.carry["seen"] + 1})

    def held_out(self) -> Any:
        return self.data()[:4]


def test_a_run_shorter_than_a_batch_can_be_read_again(tmp_path: Path) -> None:
    config = configuration(
        layout={"micro_batch": 4}, train={"epochs": 0.15, "global_batch": 16}, observe={"progress": False}
    )
    done = runs.train(tmp_path, config, Counting())
    assert done.step == 1
    again = runs.evaluate(tmp_path, config, Counting())
    assert again["loss"] == pytest.approx(done.evaluation["loss"])


# deadlines ------------------------------------------------------------------------------------------------------------


def deadlines(place: ProcessInfo, group: Communicator) -> list[float]:
    step = wrap.StepModule(LinearTask(), nn.Linear(3, 1))
    config = configuration(layout={"strategy": "hsdp", "shards": 2, "world_size": 4})
    wrap.wrap(step, config.layout, "fp32", torch.device("cpu"), 4, 33.0)
    groups = step.model.weight.device_mesh.get_all_groups()  # type: ignore[union-attr,operator]
    group.barrier("the last group")  # a rank that is gone is a connection that is closed, for one that still joins
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_the_deadline_reaches_the_groups_of_hsdp() -> None:
    assert processes.run(deadlines, 4)[0] == [33.0, 33.0]
