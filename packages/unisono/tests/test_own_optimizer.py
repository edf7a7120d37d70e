"""A task's own optimizer trains, is saved and resumed as ours are, on every layout; what no layout could is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import processes, runs
from packages.unisono.tests.runs import Trace, configuration, distance, trace
from packages.unisono.tests.tasks import TransformerTask
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "world_size": 2},
    "fsdp": {"strategy": "fsdp", "world_size": 2},
}


class WithRAdam(TransformerTask):
    """torch's own, which `optim` does not offer."""

    def optimizer(self, groups: Any) -> Any:
        return torch.optim.RAdam(groups, lr=1.0)


class Counting(torch.optim.SGD):
    """Keeps what no checkpoint holds."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1
        return result


class PartAlone(torch.optim.SGD):
    """Keeps a tensor of its process's part of a sharded parameter."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                whole = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                self.state[parameter]["size"] = whole.detach().abs()
        return result


def config(**groups: Any) -> Any:
    train = {"steps": 4, "global_batch": 8, "precision": "fp64"}
    return configuration(train=train, observe={"progress": False}, **groups)


def test_it_trains_and_a_resumed_run_continues_its_state_bit_for_bit(tmp_path: Path):
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    runs.train(whole, config(), WithRAdam())
    runs.train(other, config(), TransformerTask())
    for before in (2, None):
        with runs.interrupted(before):
            runs.train(parts, config(checkpoint={"every": 1}), WithRAdam())
    one, two, ours = map(runs.saved_arrays, (whole, parts, other))
    assert any(name.endswith("/exp_avg_sq") and array.any() for name, array in one.items())
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert any(not np.array_equal(one[name], ours[name]) for name in one if name.startswith("model/"))


def on_two(place: ProcessInfo, group: Communicator, layout: dict[str, Any]) -> Trace:
    return trace(place, group, WithRAdam(), config(layout=layout))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_makes_the_same_updates(name: str):
    """Parameters that moved, and losses, are equal to rounding."""
    reference = trace(ProcessInfo(), SingleProcess(), WithRAdam(), config())
    found = processes.run(on_two, 2, LAYOUTS[name])[0]
    assert max(distance(reference.before, reference.parameters).values()) > 1e-3
    assert max(distance(reference.parameters, found.parameters).values()) < 1e-10
    assert found.losses == pytest.approx(reference.losses, rel=1e-12)


def refused(place: ProcessInfo, group: Communicator, kind: str) -> str:
    class Own(TransformerTask):
        def optimizer(self, groups: Any) -> Any:
            return {"Counting": Counting, "PartAlone": PartAlone}[kind](groups, lr=1.0)

    try:
        trace(place, group, Own(), config(layout=LAYOUTS["fsdp"]))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [("Counting", "'calls' of .* as int, which no checkpoint holds"), ("PartAlone", "'size' of .* part alone")],
)
def test_a_state_that_no_checkpoint_holds_or_of_a_part_alone_is_refused(kind: str, said: str):
    for text in processes.run(refused, 2, kind):
        assert re.search(said, text), text


@pytest.mark.parametrize(
    ("made", "optim", "said"),
    [
        (lambda groups: "adam", {}, r"returned str; return a torch\.optim\.Optimizer"),
        (lambda groups: torch.optim.SGD([p for g in groups for p in g["params"]]), {}, "is not over the groups"),
        (
            lambda groups: torch.optim.SGD(groups),
            {"groups": [{"match": "*", "rule": "sign_sgd"}]},
            "updates all parameters, so optim=muon",
        ),
    ],
)
def test_what_is_not_over_the_given_groups_is_refused(made: Any, optim: dict[str, Any], said: str):
    class Own(TransformerTask):
        def optimizer(self, groups: Any) -> Any:
            return made(groups)

    with pytest.raises(ConfigError, match=said):
        trace(ProcessInfo(), SingleProcess(), Own(), config(optim={"kind": "adamw", **optim}))
