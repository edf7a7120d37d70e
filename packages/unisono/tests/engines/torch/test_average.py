"""A moving average of the weights: what it holds, where it lies, and what an evaluation with it leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import SGD, averages, configuration, layout, parameters, started, whole
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.checkpoint.core.arrays import ArrayReader
from unisono.config.schema.run import Ema
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.numerics.ema import MovingAverage
from unisono.optim.sharded import local
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import CheckpointError, ConfigError, GuardError
from unisono.training import loop

EMA = {"ema": {"decay": 0.7, "start": 1, "every": 2}}


class Kept(LinearTask):
    """A layer that is trained, one that is not, and running statistics."""

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model

    def held_out(self) -> Any:
        return super().data()[:9]


def followed(
    place: ProcessInfo, group: Communicator, config: Any
) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """The weights and their average after the start and after every step."""
    engine, steps = started(place, group, Kept(), config)
    history = []
    for number in range(len(steps) + 1):
        if number:
            engine.step(steps[number - 1], number - 1, {"lr": 0.1})
        history.append((parameters(engine), averages(engine)))
    engine.close()
    return history


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_the_average_is_what_its_formula_says_in_master_precision(precision: str) -> None:
    config = configuration(train={"steps": 6, "global_batch": 8, "precision": precision}, **EMA)
    history = processes.alone(followed, config)
    wide = np.float64 if precision == "fp64" else np.float32
    expected = {}
    for made, (weights, average) in enumerate(history):
        assert set(average) == {"1.weight", "1.bias", "2.weight", "2.bias"}, "what is trained, and nothing else"
        for name, value in average.items():
            assert value.dtype == wide
            if made <= 1:
                expected[name] = weights[name]
            elif made in (3, 5):  # the first and the second renewal
                decay = {3: 1 / 10, 5: 2 / 11}[made]
                expected[name] = decay * expected[name] + (1 - decay) * weights[name]
            np.testing.assert_allclose(value, expected[name], rtol=4 * np.finfo(wide).eps)
    assert not np.array_equal(history[-1][0]["2.weight"], history[-1][1]["2.weight"])


def test_what_is_excluded_is_not_averaged_and_a_pattern_without_a_match_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    kept = MovingAverage(Ema(decay=0.5, exclude=["0.*"]), model)
    assert set(kept.tensors) == {"1.weight", "1.bias"}
    begun = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with kept.swap_in():
        assert torch.equal(model[0].weight, begun["0.weight"] + 1.0) and torch.equal(model[1].weight, begun["1.weight"])
    with pytest.raises(ConfigError, match=r"ema\.exclude: '2\.\*' matches no parameter"):
        MovingAverage(Ema(decay=0.5, exclude=["2.*"]), model)


def laid_out(place: ProcessInfo, group: Communicator, config: Any) -> tuple[int, int, bool]:
    """Elements of the average on this process and in all, and whether it lies as the weights do."""
    engine, steps = started(place, group, TransformerTask(), config)
    engine.step(steps[0], 0, {"lr": 0.1})
    weights = dict(engine.view.module.named_parameters())
    own = sum(local(value).numel() for value in engine.train_state.average.tensors.values())
    alike = all(
        isinstance(value, DTensor) and value.placements == weights[name].placements
        for name, value in engine.train_state.average.tensors.items()
    )
    return own, sum(value.numel() for value in engine.train_state.average.tensors.values()), alike


def test_each_process_holds_the_average_of_its_own_shards() -> None:
    config = configuration(layout=layout("fsdp"), ema={"decay": 0.9})
    for own, every, alike in processes.run(laid_out, 2, config):
        assert alike
        assert own < 0.6 * every


# evaluation -----------------------------------------------------------------------------------------------------------


@contextmanager
def trained(place: ProcessInfo, group: Communicator, config: Any, folder: Path) -> Iterator[loop.Training]:
    with runs.training(TransformerTask(), config, place, group, folder) as training:
        for _ in training.steps():
            pass
        yield training


def evaluated(place: ProcessInfo, group: Communicator, config: Any, folder: Path) -> list[Any]:
    """What an evaluation says of the average, what one says once the weights are the average, and what was changed."""
    with trained(place, group, config, folder) as training:
        engine: Any = training._parts.engine
        before = {n: replicas.digest(p) for n, p in engine.view.module.named_parameters()}
        average = {n: replicas.digest(p) for n, p in engine.train_state.average.tensors.items()}
        said = dict(training.evaluated)
        training._evaluation.evaluate(4, training._telemetry.record)
        left = before == {n: replicas.digest(p) for n, p in engine.view.module.named_parameters()}
        left = left and average == {n: replicas.digest(p) for n, p in engine.train_state.average.tensors.items()}
        with engine.train_state.average.swap_in():
            put = engine.evaluate(training._parts.held_out.batches(), 4, {"lr": 0.1}).values
        return [said, training.evaluated, put, left]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_an_evaluation_with_the_average_says_what_a_model_of_it_would_and_changes_nothing(
    tmp_path: Path, strategy: str
) -> None:
    config = configuration(layout=layout(strategy), ema={"decay": 0.9}, observe={"progress": False})
    for said, again, put, left in processes.ranks(evaluated, config.layout.world_size, config, tmp_path):
        assert said == again
        assert left, "weights and average keep every bit"
        assert put == {name: said[f"ema/{name}"] for name in put}
        assert said["ema/loss"] != said["loss"]


@pytest.mark.parametrize(("weights", "names"), [("model", {"loss"}), ("ema", {"ema/loss"})])
def test_the_configuration_says_which_weights_are_evaluated(tmp_path: Path, weights: str, names: set[str]) -> None:
    config = configuration(train={"steps": 2, "global_batch": 8}, eval={"weights": weights}, ema={"decay": 0.5})
    with runs.training(Kept(), config, ProcessInfo(), SingleProcess(), tmp_path) as training:
        assert len(list(training.steps())) == 2
    assert set(training.evaluated) == names


def test_the_weights_come_back_when_an_evaluation_fails(tmp_path: Path) -> None:
    engine, steps = processes.alone(started, TransformerTask(), configuration(ema={"decay": 0.9}))
    engine.step(steps[0], 0, {"lr": 0.1})
    before = parameters(engine)

    def broken() -> Iterator[Any]:
        yield steps[0]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        engine.evaluate(broken(), 1, {"lr": 0.1}, True)
    assert all(np.array_equal(before[name], value) for name, value in parameters(engine).items())


# checkpoints and guards -----------------------------------------------------------------------------------------------


def saved(config: Any, folder: Path) -> ArrayReader:
    runs.train(folder, config, TransformerTask())
    return runs.newest(folder).reader()


def test_an_average_that_was_not_saved_begins_with_the_weights_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = {"observe": {"progress": False}}
    reader = saved(configuration(**quiet), tmp_path)
    engine, _ = processes.alone(started, TransformerTask(), configuration(ema={"decay": 0.9}))
    with caplog.at_level(logging.WARNING, logger="unisono"):
        engine.load(reader)
    assert "no moving average" in caplog.text
    weights = parameters(engine)
    assert all(
        np.array_equal(whole(value), weights[name]) for name, value in engine.train_state.average.tensors.items()
    )


def test_an_average_of_other_parameters_is_refused(tmp_path: Path) -> None:
    reader: Any = saved(configuration(observe={"progress": False}, ema={"decay": 0.9}), tmp_path)
    engine, _ = processes.alone(started, TransformerTask(), configuration(ema={"decay": 0.9}))
    del reader._arrays["ema/norm.weight"]
    with pytest.raises(CheckpointError, match=r"missing \['ema/norm\.weight'\]"):
        engine.load(reader)


def drifted(place: ProcessInfo, group: Communicator, config: Any) -> str:
    engine, steps = started(place, group, TransformerTask(), config)
    engine.step(steps[0], 0, {"lr": 0.1})
    with torch.no_grad():
        engine.train_state.average.tensors["norm.weight"].add_(1e-6 * place.rank)
    try:
        engine.step(steps[1], 1, {"lr": 0.1})
    except GuardError as error:
        return str(error)
    return ""


def test_averages_that_differ_between_ranks_are_noticed() -> None:
    config = configuration(layout=layout("ddp"), train={"guard_every": 2}, ema={"decay": 0.9}, optim=SGD)
    for told in processes.run(drifted, 2, config):
        assert "'ema/norm.weight' is not the same on ranks [0] and [1]" in told
