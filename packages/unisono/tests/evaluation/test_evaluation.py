"""An evaluation is the loss of all held-out rows as one batch, on any layout, and leaves no trace in the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, started
from packages.unisono.tests.tasks import LENGTH, Transformer, TransformerTask, Words
from unisono.engines.observers import StepResult
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.numerics.precision import promotion
from unisono.evaluation.held_out import HeldOut
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import DataError
from unisono.runtime.rng import generator
from unisono.task import Context, Loss, SampleContext


class Frozen(nn.Dropout):
    """A module that stays in evaluation, whatever it is told."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


class Counting(nn.Module):
    """A module that changes its buffer in every forward pass, in training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.unsaved += x.detach().mean()
        return x


class Probed(Transformer):
    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.frozen, self.counting = Frozen(0.5), Counting()
        self.seen: list[tuple[Context, bool]] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.counting(self.frozen(super().forward(tokens)))


class ProbedTask(TransformerTask):
    """The transformer with strong dropout, and everything in it that an evaluation could disturb."""

    class Config(TransformerTask.Config):
        dropout: float = 0.5

    def held_out(self) -> Words:
        return Words(13)

    def build(self) -> nn.Module:
        return Probed(self.config.dropout)

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        model.seen.append((context, model.training))
        return super().outputs(model, batch, context)


@contextmanager
def ready(
    place: ProcessInfo, group: Communicator, config: Any, task: ProbedTask | None = None
) -> Iterator[tuple[Any, HeldOut]]:
    """An engine that is set up, and the held-out rows."""
    task = task or ProbedTask()
    engine, steps = started(place, group, task, config)
    try:
        micro_batch = config.layout.micro_batch or max(micro.size for micro in steps[0])
        yield engine, HeldOut(task, task.held_out(), config, place, micro_batch)
    finally:
        engine.close()


def alone(task: ProbedTask | None = None, **groups: Any) -> Any:
    return ready(ProcessInfo(), SingleProcess(), configuration(train={"precision": "fp64"}, **groups), task)


def evaluate(engine: TorchEngine, held_out: HeldOut) -> StepResult:
    return engine.evaluate(held_out.batches(), 7, {"lr": 0.1})


# the same everywhere ------------------------------------------------------------------------------------------------


def evaluations(place: ProcessInfo, group: Communicator, configs: list[Any]) -> list[tuple[StepResult, StepResult]]:
    """Each configuration's evaluation, twice."""
    results = []
    for config in configs:
        with ready(place, group, config) as (engine, held_out):
            results.append((evaluate(engine, held_out), evaluate(engine, held_out)))
    return results


MICRO_BATCHES = (1, 3, 4, 13)
STRATEGIES = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def reference() -> StepResult:
    config = configuration(train={"precision": "fp64"}, eval={"micro_batch": 13})
    return processes.alone(evaluations, [config])[0][0]


@pytest.fixture(scope="module")
def on_two() -> dict[tuple[str, int], list[tuple[StepResult, StepResult]]]:
    """By strategy and micro-batch, what each rank was told."""
    cases = [(strategy, micro) for strategy in STRATEGIES for micro in MICRO_BATCHES]
    configs = [
        configuration(
            layout={"strategy": strategy, "world_size": 2}, train={"precision": "fp64"}, eval={"micro_batch": micro}
        )
        for strategy, micro in cases
    ]
    ranks = processes.run(evaluations, 2, configs)
    return {case: [rank[i] for rank in ranks] for i, case in enumerate(cases)}


def _same(mine: StepResult, theirs: StepResult) -> None:
    assert mine.loss == pytest.approx(theirs.loss, rel=1e-12, abs=0)
    assert mine.terms == pytest.approx(theirs.terms, rel=1e-12, abs=0)
    assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-12, abs=0)
    assert mine.work == theirs.work


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro", MICRO_BATCHES)
def test_two_processes_evaluate_what_one_does_on_every_rank_and_twice_the_same(
    on_two: Any, reference: StepResult, strategy: str, micro: int
) -> None:
    (first, again), other = on_two[strategy, micro]
    _same(first, reference)
    assert (first, again) == other
    assert first == again


@pytest.mark.parametrize("micro", [1, 2, 5, 100])
def test_the_micro_batch_changes_nothing(reference: StepResult, micro: int) -> None:
    with alone(eval={"micro_batch": micro}) as (engine, held_out):
        _same(evaluate(engine, held_out), reference)


# what it is ---------------------------------------------------------------------------------------------------------


def test_an_evaluation_is_the_loss_of_all_rows_as_one_batch() -> None:
    with alone(eval={"micro_batch": 4}) as (engine, held_out):
        result, task, model = evaluate(engine, held_out), ProbedTask(), engine.view.module
        source = task.held_out()
        contexts = [SampleContext(generator(0, "eval", 0, row), training=False) for row in range(len(source))]
        batch = task.collate([task.sample(record, one) for record, one in zip(source, contexts, strict=True)])
        model.eval()
        with torch.no_grad(), promotion("fp64"):  # the model casts to fp32 inside, as models do
            scores = model(torch.from_numpy(batch["tokens"][:, :-1])).log_softmax(-1)
        targets = torch.from_numpy(batch["tokens"][:, 1:])
        chosen = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)[targets != 0]
        hits = (scores.argmax(-1) == targets)[targets != 0]
        assert result.terms["next"] == pytest.approx(float(-chosen.mean()), rel=1e-12)
        assert result.metrics["accuracy"] == pytest.approx(float(hits.double().mean()), rel=1e-12)
        assert result.loss == pytest.approx(result.terms["next"] + 0.3 * result.terms["length"], rel=1e-12)
        assert result.work == {"rows": 13.0, "tokens": float((batch["tokens"] != 0).sum())}
        assert batch["lengths"].max() <= LENGTH


class Augmenting(ProbedTask):
    """Augments whatever it is given, as `sample` did before it knew whether it is for training."""

    def sample(self, record: Any, context: SampleContext) -> Any:
        return super().sample(record, replace(context, training=True))


class Masking(Augmenting):
    draws_in_evaluation = True


def held_out_arrays(task: ProbedTask, seed: int) -> list[dict[str, Any]]:
    config = configuration(run={"seed": seed}, eval={"micro_batch": 4})
    held_out = HeldOut(task, task.held_out(), config, ProcessInfo(), 4)
    try:
        return [micro.arrays for batches in held_out.batches() for micro in batches]
    finally:
        held_out.close()


def test_held_out_rows_are_not_augmented_and_rows_to_train_on_are() -> None:
    task, rows = ProbedTask(), Words(13)
    held_out = np.concatenate([arrays["tokens"] for arrays in held_out_arrays(task, seed=0)])
    assert np.array_equal(held_out, task.collate(list(rows))["tokens"])
    drawn = SampleContext(generator(0), training=True)
    assert any(not np.array_equal(task.sample(row, drawn), row) for row in rows)


def test_a_task_that_augments_held_out_rows_is_refused_before_the_first_step() -> None:
    with pytest.raises(
        DataError, match=r"Augmenting\.sample draws random numbers for held-out rows \(row 0\)"
    ) as caught:
        held_out_arrays(Augmenting(), seed=0)
    assert caught.value.fault == "Held-out rows are augmented"


def test_a_task_that_means_to_draw_in_evaluation_draws_the_same_for_a_row_every_time_and_in_every_run() -> None:
    first, again, other = (held_out_arrays(Masking(), seed) for seed in (0, 0, 5))
    for mine, same, theirs in zip(first, again, other, strict=True):
        assert np.array_equal(mine["tokens"], same["tokens"])
        assert np.array_equal(mine["tokens"], theirs["tokens"])


def test_an_evaluation_is_made_without_dropout() -> None:
    with alone(ProbedTask(ProbedTask.Config(dropout=0.0))) as (engine, held_out):
        without = evaluate(engine, held_out)
    with alone() as (engine, held_out):
        assert evaluate(engine, held_out) == without


def test_a_task_is_told_that_it_is_evaluated_and_after_which_update() -> None:
    with alone() as (engine, held_out):
        engine.view.module.seen.clear()
        evaluate(engine, held_out)
        assert engine.view.module.seen
        for context, training in engine.view.module.seen:
            assert (context.training, training, context.step, context.scalars) == (False, False, 7, {"lr": 0.1})


class Sampling(ProbedTask):
    """A task that draws random numbers in evaluation."""

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        loss = super().loss(outputs, batch, context)
        return Loss(loss.sums, loss.weights, {"drawn": (torch.rand(()), 1.0)})


def test_what_an_evaluation_draws_is_the_same_every_time() -> None:
    with alone(Sampling(), eval={"micro_batch": 4}) as (engine, held_out):
        first = evaluate(engine, held_out)
        torch.manual_seed(99)
        assert evaluate(engine, held_out) == first


# what it leaves -----------------------------------------------------------------------------------------------------


def test_an_evaluation_that_fails_leaves_the_training_mode_too() -> None:
    def broken() -> Iterator[Any]:
        yield from ()
        raise ZeroDivisionError

    with alone() as (engine, _):
        with pytest.raises(ZeroDivisionError):
            engine.evaluate(broken(), 7, {"lr": 0.1})
        assert engine.view.module.training


def test_an_evaluation_leaves_modes_buffers_gradients_parameters_and_the_generator() -> None:
    with alone() as (engine, held_out):
        model = engine.view.module
        model.blocks[0].eval()  # by hand, as tasks do that freeze a part
        model.counting.passes += 5
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        torch.manual_seed(5)

        def state() -> list[torch.Tensor]:
            parts = [part for p in model.parameters() for part in (p.detach(), p.grad)]
            return [value.clone() for value in (*parts, *model.buffers(), torch.get_rng_state())]

        modes, before = {name: module.training for name, module in model.named_modules()}, state()
        evaluate(engine, held_out)
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert set(modes.values()) == {True, False} and not modes["frozen"]
        assert {"counting.passes", "counting.unsaved"} < {name for name, _ in model.named_buffers()}
        assert all(torch.equal(now, then) for now, then in zip(state(), before, strict=True))
