"""The step around the mathematics: what is refused, what is restored, and what never reaches the parameters."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import (
    configuration,
    distance,
    layout,
    logged,
    parameters,
    started,
    trace,
    traces,
    whole,
)
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.data.order.order import Order
from unisono.engines.torch.guards.replicas import exceeds_rounding
from unisono.engines.torch.numerics import precision
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError, GuardError, NonFiniteError
from unisono.task import Context, Loss

STRATEGIES = ["ddp", "fsdp"]


def outcome(
    place: ProcessInfo, group: Communicator, task: Any, config: Any, lr: float = 0.1
) -> tuple[str, str, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What stops a run: the error's kind and text, and the parameters before it and after it."""
    engine, steps = started(place, group, task, config)
    before = parameters(engine)
    try:
        for number, batches in enumerate(steps):
            before = parameters(engine)
            engine.step(batches, number, {"lr": lr})
    except (NonFiniteError, GuardError) as error:
        return type(error).__name__, str(error), before, parameters(engine)
    return "", "", before, parameters(engine)


# what is not finite ---------------------------------------------------------------------------------------------------


class NanRow(LinearTask):
    """Row 17 is not a number."""

    def data(self) -> Any:
        rows = super().data()
        rows[17] = {**rows[17], "x": np.full(3, np.nan, np.float32)}
        return rows


class NanGradient(LinearTask):
    """The loss is finite everywhere, its gradient is not where the 17th row is."""

    def data(self) -> Any:
        rows = super().data()
        rows[17] = {**rows[17], "x": np.full(3, 77.0, np.float32)}
        return rows

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        bent = torch.where(batch["x"][:, :1] == 77.0, (outputs * 0).sqrt(), outputs)
        return Loss({"square": (bent - batch["y"]).square().sum()})


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
@pytest.mark.parametrize("task", [NanRow, NanGradient])
def test_what_is_not_finite_never_reaches_the_parameters(strategy: str, task: type[LinearTask]) -> None:
    config = configuration(layout=layout(strategy, micro_batch=2), train={"epochs": 1, "global_batch": 8})
    results = processes.ranks(outcome, config.layout.world_size, task(), config)
    order = Order(40, 0)(np.arange(40)).tolist()
    step = order.index(17) // 8 + 1
    rank = order.index(17) % 8 // 4 if strategy != "single" else 0
    for kind, text, before, after in results:
        assert kind == "NonFiniteError"
        assert f"step {step}:" in text
        assert f"rank {rank}, " in text
        assert all(np.array_equal(after[name], value) and np.isfinite(value).all() for name, value in before.items())
        if task is NanRow:
            assert "the loss is not finite" in text
            assert "source rows [17]: term 'square'" in text
        else:
            assert "the gradient is not finite" in text
            rows = [int(row) for row in re.findall(r"source rows \[([\d, ]+)\]", text)[0].split(",")]
            assert 17 in rows
            assert len(rows) == 2
            assert "gradient of 'model.weight'" in text
    assert len({text for _, text, _, _ in results}) == 1, "all ranks say the same"


# state ----------------------------------------------------------------------------------------------------------------


class LateExpert(LinearTask):
    """A second layer has its first gradient in the third step."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return sum(layer(batch["x"]) for layer in list(model.children())[: 1 if context.step < 2 else 2])


def test_an_earlier_state_is_loaded_into_an_optimizer_that_keeps_more_by_now(tmp_path: Path) -> None:
    """As a proof does; a later expert's momentum was missed in the checkpoint, although none existed then."""
    runs.train(tmp_path, configuration(train={"steps": 2, "global_batch": 8}), LateExpert())
    engine, steps = processes.alone(started, LateExpert(), configuration(train={"steps": 3, "global_batch": 8}))
    for number, batches in enumerate(steps):
        engine.step(batches, number, {"lr": 0.1})
    assert {name.split("/")[1] for name in engine.train_state.optimizer_tensors()} > {"0.weight", "0.bias"}
    engine.load(runs.newest(tmp_path).reader())
    assert {name.split("/")[1] for name in engine.train_state.optimizer_tensors()} == {"0.weight", "0.bias"}


# guards ---------------------------------------------------------------------------------------------------------------


class DrawsByRank(LinearTask):
    def build(self) -> nn.Module:
        torch.manual_seed(torch.distributed.get_rank())
        return super().build()


class ChangesAWeight(LinearTask):
    """A parameter is changed outside the optimizer, differently on every rank."""

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        if context.step == 2 and context.training:
            with torch.no_grad():
                next(model.parameters()).add_(1e-3 * torch.distributed.get_rank())
        return super().outputs(model, batch, context)


class GoesRound(LinearTask):
    """The loss comes from a copy of the model that no wrapper knows; its gradients never reach the optimizer."""

    def build(self) -> nn.Module:
        self.own = super().build()
        return nn.Linear(3, 1)

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return self.own(batch["x"])


def test_initial_weights_that_depend_on_the_rank_are_refused() -> None:
    config = configuration(layout=layout("ddp"), train={"global_batch": 8})
    with pytest.raises(AssertionError, match=r"GuardError: initial parameters differ: 'weight' is not the"):
        processes.run(started, 2, DrawsByRank(), config)


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_replicas_that_differ_are_named(strategy: str) -> None:
    more = {"shards": 1} if strategy == "hsdp" else {}
    config = configuration(layout=layout(strategy, **more), train={"steps": 5, "global_batch": 8, "guard_every": 4})
    if strategy == "hsdp":  # the task changes the gathered copy of the weight, which FSDP throws away
        assert {kind for kind, *_ in processes.run(outcome, 2, ChangesAWeight(), config)} == {""}
        return
    for kind, text, _, _ in processes.run(outcome, 2, ChangesAWeight(), config):
        assert kind == "GuardError"
        assert "replicas differ: step 4, 'weight' is not the same on ranks [0] and [1]" in text


def test_a_model_that_the_engine_does_not_know_is_noticed() -> None:
    config = configuration(train={"global_batch": 8})
    with pytest.raises(ConfigError, match="does not use any parameter of the model that build"):
        processes.alone(outcome, GoesRound(), config)


def test_an_optimizer_on_stale_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.optim import optimizers

    build = optimizers.build_optimizer
    monkeypatch.setattr(optimizers, "build_optimizer", lambda config, *_: build(config, nn.Linear(3, 1)))
    with pytest.raises(GuardError, match=r"2 are missing \(weight, bias\), and 2 of its own are not in the model"):
        processes.alone(outcome, LinearTask(), configuration(train={"global_batch": 8}))


def test_an_update_that_changes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: None)
    kind, text, _, _ = processes.alone(outcome, LinearTask(), configuration(train={"global_batch": 8}))
    assert kind == "GuardError"
    assert "the update changed none of the 2 parameters that have a gradient" in text


def test_an_update_that_is_lost_to_rounding_is_no_fault_and_one_that_is_not_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beginning of a warm-up of 60,000 steps the rate is below the rounding of two parameters."""
    config = configuration(train={"global_batch": 8, "steps": 1})
    kind, _, before, after = processes.alone(outcome, LinearTask(), config, 1e-12)
    assert kind == ""
    assert all(np.array_equal(before[name], after[name]) for name in before), "or this would not be tested"
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    assert [exceeds_rounding(weight, lr) for lr in (5e-9, 1e-6)] == [False, True]
    weight.grad = torch.full((3,), 1e-6)  # plain gradient descent changes it by the product
    assert [exceeds_rounding(weight, lr) for lr in (1e-3, 1.0)] == [False, True]
    with torch.no_grad():
        weight[0] = 0.0  # any change is visible there
    assert exceeds_rounding(weight, 5e-9)


def test_master_weights_stay_fp32_under_bf16_and_are_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configuration(train={"global_batch": 8, "precision": "bf16"})
    engine, _ = processes.alone(started, LinearTask(), config)
    assert {parameter.dtype for parameter in engine.view.module.parameters()} == {torch.float32}
    monkeypatch.setattr(precision, "to_master", lambda model, precision: None)
    half = type("Half", (LinearTask,), {"build": lambda self: nn.Linear(3, 1, dtype=torch.bfloat16)})
    with pytest.raises(GuardError, match=r"should be torch.float32, but these are not: weight \(torch.bfloat16\)"):
        processes.alone(started, half(), config)


class Detached(LinearTask):
    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return super().outputs(model, batch, context).detach()


class MoreTerms(LinearTask):
    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": 1.0, "other": 2.0}


class PerRow(LinearTask):
    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().squeeze(1)})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Detached, "the loss does not depend on any trainable parameter"),
        (MoreTerms, r"returned the terms \['square'\], but counts\(\) counted \['other', 'square'\]"),
        (PerRow, r"must return scalar sums over the rows; got the shapes square \(8,\)"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused_before_the_first_step(task: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.alone(started, task(), configuration(train={"global_batch": 8}))


# counts, idle processes, buffers --------------------------------------------------------------------------------------


class NothingCounts(TransformerTask):
    """In the second term nothing ever counts."""

    def counts(self, batch: Any) -> dict[str, float]:
        return {**super().counts(batch), "length": 0.0}


def test_a_term_that_counts_nothing_is_zero_and_not_nan() -> None:
    config = configuration(train={"steps": 3, "precision": "fp64"})
    mine = processes.alone(trace, NothingCounts(), config)
    without = processes.alone(trace, TransformerTask(TransformerTask.Config(embedding_penalty=0.0)), config)
    assert all(metrics["length"] == 0.0 for metrics in mine.metrics)
    assert mine.losses == pytest.approx(without.losses, rel=1e-14)
    assert max(distance(mine.parameters, without.parameters).values()) < 1e-14


class Normalised(LinearTask):
    """A model with running statistics: a buffer that every training pass changes."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def statistics(place: ProcessInfo, group: Communicator, config: Any) -> tuple[list[float], list[int]]:
    engine, steps = started(place, group, Normalised(), config)
    norm = engine.view.module[0]
    seen = [int(norm.num_batches_tracked)]
    for number, batches in enumerate(steps):
        engine.step(batches, number, {"lr": 0.01})
        seen.append(int(norm.num_batches_tracked))
    return norm.running_mean.tolist(), seen


def test_warm_up_and_idle_passes_leave_no_trace_in_buffers() -> None:
    config = configuration(layout=layout("ddp"), train={"epochs": 12 / 40, "global_batch": 8})
    (_, first), (_, second) = processes.run(statistics, 2, config)
    assert first == [0, 1, 2]
    assert second == [0, 1, 1], "the second process has no row in the last batch of four"


def test_statistics_of_single_processes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "unisono"):
        processes.alone(statistics, configuration(train={"steps": 1, "global_batch": 8}))
    assert "running statistics" not in caplog.text


# parameters without a gradient ----------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.often(x)
        return y + self.seldom(x) if bool((x.sum() > 0).any()) else y


class BranchingTask(LinearTask):
    def build(self) -> nn.Module:
        return Branches()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_that_some_batches_leave_out_train_as_on_one_process(strategy: str, told: bool) -> None:
    settings = {"train": {"steps": 5, "global_batch": 8, "precision": "fp64"}}
    one = processes.alone(trace, BranchingTask(), configuration(layout={"micro_batch": 2}, **settings))
    config = configuration(layout=layout(strategy, micro_batch=2, find_unused_parameters=told), **settings)
    many = processes.run(trace, 2, BranchingTask(), config)[0]
    assert np.any(one.parameters["seldom.weight"] != one.before["seldom.weight"])
    assert np.array_equal(one.parameters["never.weight"], one.before["never.weight"])
    assert max(distance(many.parameters, one.parameters).values()) < 1e-12
    assert many.losses == pytest.approx(one.losses, rel=1e-12)


def unused(place: ProcessInfo, group: Communicator, config: Any) -> tuple[list[str], bool, bool]:
    with logged() as records:
        engine, steps = started(place, group, BranchingTask(), config)
        for number, batches in enumerate(steps):
            engine.step(batches, number, {"lr": 0.01})
    wrapped = engine.train_state.parallel.wrapped
    return records, wrapped.find_unused_parameters, wrapped.static_graph


def test_ddp_finds_out_about_unused_parameters_by_itself_and_names_them() -> None:
    config = configuration(layout=layout("ddp"), train={"steps": 3, "global_batch": 8})
    for records, finds, static in processes.run(unused, 2, config):
        assert (finds, static) == (True, False)
        assert any("got no gradient in the first pass" in text and "never.bias" in text for text in records)


# what a layout may not change -----------------------------------------------------------------------------------------


def tied(place: ProcessInfo, group: Communicator, config: Any) -> tuple[bool, bool, list[str]]:
    engine, steps = started(place, group, TransformerTask(), config)
    for number, batches in enumerate(steps):
        engine.step(batches, number, {"lr": 0.1})
    model = engine.view.module
    names = [shard.name for shard in engine.state() if "embedding" in shard.name or "head" in shard.name]
    return (
        model.head.weight is model.embedding.weight,
        np.array_equal(whole(model.head.weight), whole(model.embedding.weight)),
        names,
    )


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "hsdp"])
def test_tied_weights_stay_tied_and_are_saved_once(strategy: str) -> None:
    config = configuration(layout=layout(strategy), train={"steps": 3})
    results = processes.ranks(tied, config.layout.world_size, config)
    assert all(same and equal for same, equal, _ in results)
    assert {name for _, _, names in results for name in names} == {
        "model/embedding.weight",
        "optimizer/embedding.weight/momentum_buffer",
    }


@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp"])
def test_bf16_computes_the_same_on_every_layout(strategy: str) -> None:
    """Far below what bf16 itself costs: the same numbers are rounded, only fp32 sums are ordered differently."""
    task, train = TransformerTask(), {"steps": 1, "precision": "bf16"}
    exact = processes.alone(trace, task, configuration(layout={"micro_batch": 3}, train={"steps": 1}))
    one = processes.alone(trace, task, configuration(layout={"micro_batch": 3}, train=train))
    many = processes.run(trace, 2, task, configuration(layout=layout(strategy, micro_batch=3), train=train))[0]
    assert np.median(list(distance(one.gradients, exact.gradients).values())) > 1e-3, "bf16 was not used"
    assert max(distance(many.gradients, one.gradients).values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_compiled_blocks_compute_the_same(strategy: str) -> None:
    train = {"steps": 3, "precision": "fp32"}
    one = processes.alone(trace, TransformerTask(), configuration(train=train))
    config = configuration(layout=layout(strategy, compile=True), train=train)
    many = processes.ranks(trace, config.layout.world_size, TransformerTask(), config)[0]
    assert max(distance(many.gradients, one.gradients).values()) < 1e-5
    assert many.losses == pytest.approx(one.losses, rel=1e-5)


def test_several_runs_in_one_process_do_not_disturb_each_other() -> None:
    task = TransformerTask(TransformerTask.Config(dropout=0.1))
    config = configuration(train={"steps": 2, "precision": "fp64"})
    first, second = processes.alone(traces, [(task, config), (task, config)])
    assert first.losses == second.losses
    assert torch.get_default_dtype() == torch.float32
