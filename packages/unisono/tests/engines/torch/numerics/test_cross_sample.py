"""Losses across samples: what a task is given, what the engine makes of it, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from packages.unisono.tests import processes
from packages.unisono.tests.pairs import FEATURES, ROWS, Paired
from packages.unisono.tests.runs import Trace, assert_same, configuration, distance, started, trace, traces
from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.engines.torch.numerics.cross_sample import gather_rows
from unisono.engines.torch.state.train_state import build_model
from unisono.evaluation.held_out import HeldOut
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import ConfigError, NonFiniteError
from unisono.runtime.rng import key
from unisono.task import Context, GlobalBatch, Loss, Task

LOSSES = ("distance", "contrast", "whole")


def config(strategy: str = "single", world: int = 1, micro: int | None = None, **groups: Any) -> RunConfig:
    layout = {"strategy": strategy, "world_size": world, "micro_batch": micro, **groups.pop("layout", {})}
    train = {"epochs": 1.0, "global_batch": 16, "precision": "fp64", "clip_norm": None, **groups.pop("train", {})}
    return configuration(layout=layout, train=train, **groups)


def paired(loss: str = "distance", **more: Any) -> Paired:
    return Paired(Paired.Config(loss=loss, **more))


# against plain autograd -----------------------------------------------------------------------------------------------


def plain_gradients(task: Paired, rows: list[int]) -> dict[str, np.ndarray]:
    """The gradient of the loss of these rows, as torch alone computes it: one graph, nothing gathered."""
    data = task.data()
    batch: dict[str, Any] = {
        name: torch.from_numpy(np.stack([data[row][name] for row in rows])) for name in ("x", "number")
    }
    batch["x"] = batch["x"].double()
    model = build_model(task.build, seed=0).double()
    outputs = task.outputs(model, batch, Context(0, training=True))
    everyone = None if task.cross_sample == "whole" else GlobalBatch(outputs, task.shared(batch), 0)
    if task.cross_sample == "whole":
        torch.manual_seed(key(0, "loss", 0))
    loss = task.loss(outputs, batch, Context(0, training=True, global_batch=everyone))
    sum(loss.weights.get(name, 1.0) * value / len(rows) for name, value in loss.sums.items()).backward()  # type: ignore[union-attr]
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_plain_autograd_over_the_whole_batch(loss: str) -> None:
    mine: Trace = processes.alone(trace, paired(loss), config(micro=4))
    reference = plain_gradients(paired(loss), mine.rows[0])
    local = plain_gradients(paired(loss), mine.rows[0][:4])
    assert max(distance(mine.gradients, reference).values()) < 1e-12
    assert max(distance(local, reference).values()) > 1e-2, "a micro-batch alone would do"


# what the task is given -----------------------------------------------------------------------------------------------

seen: list[tuple[Context, Any, Any]] = []


class Remembering(Paired):
    """Keeps what its loss is given in training."""

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        if context.training:
            seen.append((context, outputs, batch))
        return super().loss(outputs, batch, context)


def test_rows_are_given_with_everyone_and_with_their_place_among_them() -> None:
    seen.clear()
    mine = processes.alone(trace, Remembering(Paired.Config()), config(micro=4))
    steps = [seen[4:8], seen[8:12], seen[12:16]]  # after those of the warm-up
    for given, rows in zip(steps, mine.rows, strict=True):
        real = given[: -(-len(rows) // 4)]
        assert [context.global_batch.first for context, _, _ in real] == list(range(0, len(rows), 4))  # type: ignore[union-attr]
        for context, outputs, batch in real:
            everyone = context.global_batch
            assert everyone is not None
            assert everyone.batch["number"].tolist() == rows
            own = slice(everyone.first, everyone.first + len(batch["number"]))
            assert torch.equal(everyone.batch["number"][own], batch["number"])
            assert torch.equal(everyone.outputs["views"]["b"][own], outputs["views"]["b"])
            assert len(everyone.outputs["error"]) == len(rows)
    assert len(mine.rows[-1]) == 5


class Counting(Paired):
    """Counts its forward passes in training."""

    passes = 0

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
        self.passes += context.training
        return super().outputs(model, batch, context)


@pytest.mark.parametrize(("micro", "passes"), [(16, 1 + 3), (8, (2 + 1) + 3 * 4)])
def test_a_process_with_one_micro_batch_makes_one_pass_a_step(micro: int, passes: int) -> None:
    task = Counting(Paired.Config())
    processes.alone(trace, task, config(micro=micro))
    assert task.passes == passes, "with the warm-up's"


def test_the_whole_is_given_all_rows_once_a_step_and_what_is_shared_of_them() -> None:
    seen.clear()
    mine = processes.alone(trace, Remembering(Paired.Config(loss="whole")), config(micro=4))
    assert len(seen) == 1 + 3
    for (context, outputs, batch), rows in zip(seen[1:], mine.rows, strict=True):
        assert context.global_batch is None
        assert {name: value.tolist() for name, value in batch.items()} == {"number": rows}
        assert len(outputs["views"]["a"]) == len(rows)


class Normed(Paired):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))


def test_the_pass_without_gradients_updates_no_buffer() -> None:
    engine, steps = processes.alone(started, Normed(), config(micro=8))
    for number, batches in enumerate(steps):
        engine.step(batches, number, {"lr": 0.01})
    tracked = int(engine.view.module[1].num_batches_tracked)
    engine.close()
    assert tracked == 2 * (2 * 2 + 1), "of two views: two passes in each of two steps, and one in the last"


@pytest.mark.parametrize("micro", [8, 16])
def test_what_the_whole_loss_draws_does_not_make_the_micro_batch_part_of_the_mathematics(micro: int) -> None:
    for task, drew in ((paired("whole"), False), (paired("whole", dropout=0.5), True), (paired("distance"), False)):
        engine, steps = processes.alone(started, task, config(micro=micro))
        engine.step(next(iter(steps)), 0, {"lr": 0.01})
        engine.close()
        assert engine.random is drew


# beside other features ------------------------------------------------------------------------------------------------


class Carrying(Paired):
    """The target of a row moves with how often it was computed."""

    def initial_carry(self, batch: Any) -> dict[str, Any]:
        return {"times": torch.zeros(len(batch["x"]), dtype=batch["x"].dtype)}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        made = super().loss(outputs, batch, context)
        assert context.carry is not None
        times = context.carry["times"]
        more = (outputs["error"] * times).sum()
        return Loss({**made.sums, "own": made.sums["own"] + more}, made.weights, made.metrics, {"times": times + 1})


class Summed(Paired):
    """Its loss needs a sum over the global batch besides everyone's rows."""

    def totals(self, outputs: Any, batch: Any, context: Context) -> dict[str, Tensor]:
        return {"error": outputs["error"].sum()}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        made = super().loss(outputs, batch, context)
        factor = context.totals["error"] if context.training else 1.0
        return Loss({**made.sums, "own": made.sums["own"] * factor}, made.weights, made.metrics)


FEATURES_BESIDE: dict[str, dict[str, Any]] = {
    "moving average, spikes": {
        "ema": {"decay": 0.9},
        "train": {"epochs": 2.0},
        "optim": {"kind": "adamw", "lr": 1e-2, "skip_spikes": {"history": 3, "sigma": 1e-3, "in_a_row": 9}},
    },
    "adapter": {"adapter": {"kind": "lora", "rank": 2, "targets": ["0", "3"]}},
    "recomputed": {"layout": {"activation_checkpointing": 1}},
}


def on_two(place: ProcessInfo, group: Communicator, cases: list[tuple[Task, RunConfig]]) -> dict[str, Any]:
    """Everything that needs two processes, in one start of them."""
    rows = [3, 1]
    own = [
        torch.arange(place.rank * 10, place.rank * 10 + rows[place.rank]),
        torch.full((rows[place.rank], 2, 3), 0.1 + place.rank, dtype=torch.bfloat16),
        torch.arange(rows[place.rank]) % 2 == place.rank,
    ]
    nobody = [torch.ones(4 * (1 - place.rank), 2)]
    return {
        "gathered": [array.tolist() for array in gather_rows(own, rows)],
        "none of the second": gather_rows(nobody, [4, 0])[0].shape,
        "refused": told(place, group, Ragged(Paired.Config()), config("ddp", 2)),
        "traces": traces(place, group, cases),
    }


def told(place: ProcessInfo, group: Communicator, task: Task, asked: RunConfig) -> str:
    try:
        trace(place, group, task, asked)
    except ConfigError as error:
        return str(error)
    return ""


class Ragged(Paired):
    """Rows of the second process are longer."""

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
        long = 3 + torch.distributed.get_rank()
        return {**super().outputs(model, batch, context), "long": batch["x"][:, :long]}


BESIDE: dict[str, tuple[Any, dict[str, Any]]] = {
    "carry": (Carrying(), {}),
    "totals": (Summed(), {}),
    **{name: (paired(), groups) for name, groups in FEATURES_BESIDE.items()},
    "ordered": (paired("contrast"), {"layout": {"reduction": "ordered"}}),
    "ordered, whole": (paired("whole"), {"layout": {"reduction": "ordered"}}),
}


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return processes.run(on_two, 2, [(task, config("ddp", 2, 4, **groups)) for task, groups in BESIDE.values()])


@pytest.mark.slow
def test_arrays_of_any_dtype_and_of_unevenly_many_rows_are_gathered(both: list[dict[str, Any]]) -> None:
    one, two = both
    assert one["gathered"] == two["gathered"]
    numbers, floats, flags = one["gathered"]
    assert numbers == [0, 1, 2, 10]
    assert [row[0][0] for row in floats] == pytest.approx([0.1, 0.1, 0.1, 1.1], rel=1e-2)
    assert flags == [True, False, True, False]
    assert one["none of the second"] == two["none of the second"] == (4, 2)


@pytest.mark.slow
def test_outputs_that_differ_between_ranks_are_refused_on_all_of_them(both: list[dict[str, Any]]) -> None:
    for rank in both:
        assert "outputs long (3,) float64" in rank["refused"]
        assert "outputs long (4,) float64, shared number () int64 on rank 1" in rank["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_features_it_is_still_that_of_one_process(both: list[dict[str, Any]], name: str) -> None:
    task, groups = BESIDE[name]
    reference = processes.alone(trace, task, config(micro=4, **groups))
    plain = processes.alone(trace, paired(task.config.loss), config(micro=4))
    mine = both[0]["traces"][[*BESIDE].index(name)]
    changed = name != "recomputed" and not name.startswith("ordered")
    assert (reference.losses[-1] != pytest.approx(plain.losses[-1], rel=1e-9)) == changed, "the feature did nothing"
    assert_same(mine, reference)
    if name.startswith("ordered"):
        assert max(distance(mine.parameters, reference.parameters).values()) == 0.0


def test_in_bf16_the_loss_is_computed_on_what_the_model_returns_and_its_gradient_added_up_in_fp32() -> None:
    mine = processes.alone(trace, paired(), config(micro=2, train={"precision": "bf16"}))
    reference = processes.alone(trace, paired(), config())
    assert mine.losses == pytest.approx(reference.losses, rel=2e-2)
    assert max(distance(mine.gradients, reference.gradients).values()) < 5e-2


# refusals -------------------------------------------------------------------------------------------------------------


class Sideways(Paired):
    cross_sample = "pairs"  # type: ignore[assignment]


class CarriesAll(Carrying):
    cross_sample = "whole"  # type: ignore[assignment]


def giving(more: Callable[[dict[str, Any], Any], dict[str, Any]]) -> type[Paired]:
    """A task that returns more outputs, made of the usual ones and of the batch."""

    class Giving(Paired):
        def outputs(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
            made = super().outputs(model, batch, context)
            return {**made, **more(made, batch)}

    return Giving


class Named(Paired):
    def shared(self, batch: Any) -> dict[str, Any]:
        return {"name": [str(number) for number in batch["number"]]}


DRAWN = np.random.default_rng(0)  # which nobody seeds again


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Sideways, r"Sideways.cross_sample is 'pairs'; it can be None, 'rows' or 'whole'"),
        (CarriesAll, r"CarriesAll carries state of rows from step to step, .* use 'rows', or remove initial_carry\(\)"),
        (
            giving(lambda made, batch: {"mean": batch["x"].mean()}),
            r"micro-batch 0: 'outputs mean' is of torch.float64 with 0 axes; for a loss across samples",
        ),
        (
            giving(lambda made, batch: {"both": torch.cat([made["error"], made["error"]])}),
            r"micro-batch 0: 'outputs both' has 8 rows, but the micro-batch 4; .* must be the row",
        ),
        (
            giving(lambda made, batch: {"long": batch["x"].repeat(1, 1 + int(batch["number"][0]))}),
            r"micro-batch 1 returns .* but the previous one .*: return the same shape for every row",
        ),
        (Named, r"Named, micro-batch 0: 'shared name' is a list; .* and shared\(\) a dict of arrays"),
        (
            giving(lambda made, batch: {"error": made["error"] * DRAWN.uniform()}),
            r"the output 'error' differs in a second forward pass over the same rows",
        ),
    ],
)
def test_what_cannot_cross_samples_is_refused_before_the_first_step(task: type[Paired], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        processes.alone(trace, task(), config(micro=4))


class Broken(Paired):
    """Row 7 has no number."""

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
        made = super().outputs(model, batch, context)
        bad = torch.where(batch["number"] == 7, torch.nan, 1.0) if context.step else torch.ones(())
        return {**made, "error": made["error"] * bad}


def test_a_row_whose_output_is_not_finite_is_named_though_every_sum_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(NonFiniteError) as told:
        processes.alone(trace, Broken(Paired.Config()), config(micro=4, train={"epochs": 2.0}))
    assert "source rows [7]: outputs" in str(told.value)
    assert str(told.value).count("micro-batch") == 1


# evaluation -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "micro", "expected"), [(1, None, 16), (2, 4, 4), (4, 3, 2)])
def test_rows_are_evaluated_in_the_global_batches_of_the_training(world: int, micro: int, expected: int) -> None:
    task = paired()
    made = config(eval={"micro_batch": micro})
    ranks = [HeldOut(task, task.held_out(), made, ProcessInfo(rank, world), 16) for rank in range(world)]
    steps = [list(rank.batches()) for rank in ranks]
    assert [len(rank) for rank in steps] == [2] * world
    assert {split.micro_batch for split in (rank._split for rank in ranks)} == {expected}
    assert {split.global_batch for split in (rank._split for rank in ranks)} == {16}
    rows = [int(row) for step in range(2) for rank in steps for m in rank[step] if not m.idle for row in m.rows]
    assert rows == list(range(21))


def test_a_split_is_that_of_the_training() -> None:
    task = paired()
    held_out = HeldOut(task, task.held_out(), config(), ProcessInfo(0, 2), 4, global_batch=12)
    assert held_out._split == BatchSplit(12, 2, 3)
    assert len(task.held_out()) < ROWS
