"""The model as an observer sees it: whole on any layout, and looked at without a trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, layout, parameters, started
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.engines.observers import Observer
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

KINDS = ("parameters", "gradients", "optimizer state", "EMA")
TRAIN = {"steps": 2, "precision": "fp64"}


class Whole(Observer):
    """Everything that can be read whole, before an update and after it."""

    def __init__(self, view: Any) -> None:
        self.view, self.seen = view, dict[str, dict[str, np.ndarray]]()

    def on_update(self, step: int, scalars: Any) -> None:
        self.seen["gradients"] = self.view.whole("gradients")

    def on_step_end(self, step: int, result: Any) -> None:
        self.seen |= {kind: self.view.whole(kind) for kind in ("parameters", "optimizer state", "EMA")}


def seen(place: ProcessInfo, group: Communicator, strategy: str) -> dict[str, dict[str, np.ndarray]]:
    config = configuration(layout=layout(strategy, micro_batch=3), train=TRAIN, ema={"decay": 0.9})
    engine, steps = started(place, group, TransformerTask(), config)
    whole = Whole(engine.view)
    engine.observe(whole)
    engine.step(steps[0], 0, {"lr": 0.1})
    engine.close()
    return whole.seen


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_arrays_are_whole_on_rank_0_whatever_the_layout(strategy: str) -> None:
    one = processes.alone(seen, "single")
    first, second = processes.run(seen, 2, strategy)
    for kind in KINDS:
        assert one[kind], kind
        assert first[kind].keys() == one[kind].keys()
        assert second[kind] == {}
        for name, value in one[kind].items():
            np.testing.assert_allclose(first[kind][name], value, rtol=1e-9, atol=1e-14, err_msg=f"{kind} {name}")


def given(place: ProcessInfo, group: Communicator, strategy: str) -> bool:
    """Whether an update from the gradients of a step makes of its parameters what the step made of them."""
    results, gradients = [], dict[str, np.ndarray]()
    for again in (False, True):
        engine, steps = started(place, group, TransformerTask(), configuration(layout=layout(strategy), train=TRAIN))
        whole = Whole(engine.view)
        engine.observe(whole)
        if again:
            engine.view.update_from(gradients, 0, {"lr": 0.1})
        else:
            engine.step(steps[0], 0, {"lr": 0.1})
            own = whole.seen["gradients"]
            everyone = group.gather({name: value.tolist() for name, value in own.items()}, "gradients")
            gradients = {name: np.array(value) for name, value in everyone[0].items()}
        results.append(parameters(engine))
        engine.close()
    return all(np.array_equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_an_update_from_given_gradients_is_the_update_of_the_step_that_had_them(strategy: str) -> None:
    assert all(processes.ranks(given, 1 if strategy == "single" else 2, strategy))


class Noisy(LinearTask):
    """Draws, and counts its passes in a buffer."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))


def test_a_look_at_the_outputs_leaves_no_trace_and_is_the_same_twice() -> None:
    engine, steps = processes.alone(started, Noisy(), configuration(train={"steps": 2}))
    before = engine.view.digests()
    with engine.view.without_side_effects():
        once, again = (engine.view.outputs(steps[0][0], {}) for _ in range(2))
        assert engine.view.digests() != before, "else nothing could be left"
    assert engine.view.digests() == before
    assert torch.equal(once, again)
    assert not once.requires_grad


def test_outputs_are_named_by_their_place_in_double_precision_and_parameters_are_left_out() -> None:
    engine, _ = processes.alone(started, LinearTask(), configuration(train={"steps": 2}))
    outputs = {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": (torch.ones(1, dtype=torch.int32), 3),
        "w": nn.Parameter(torch.ones(1)),
    }
    found = engine.view.flatten(outputs)
    assert {name: value.dtype for name, value in found.items()} == {"['a']": np.float64, "['b'][0]": np.int32}
    assert [*engine.view.flatten(torch.ones(2, dtype=torch.complex64))] == ["output"]
