"""Observers see every point of a step, decide together, and change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, layout, parameters, started
from packages.unisono.tests.tasks import TransformerTask
from unisono.engines.observers import Observer, Observers, StepResult, StepVerdict
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import GuardError

RESULT = StepResult(1.0, {}, {}, {}, 2.0)


class Noting(Observer):
    """Notes every point, and that it is called with what it should see there."""

    def __init__(self, view: Any) -> None:
        self.view, self.points = view, list[str]()

    def part(self, name: str) -> Any:
        self.points.append(name)
        return nullcontext()

    def on_step_begin(self, step: int, batches: Sequence[Any]) -> None:
        assert not self.view.has_gradients()
        self.points.append(f"begin {step} {len(batches)}")

    def on_forward(self, micro: Any, outputs: Any, loss: Any) -> None:
        assert len(outputs) == micro.size
        self.points.append(f"outputs {[*loss.sums]}")

    def on_gradients(self) -> None:
        assert self.view.has_gradients()
        self.points.append("gradients")

    def votes(self) -> Sequence[float]:
        self.points.append("votes")
        return [1.0]

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        self.points.append(f"reduced {votes}")
        return None

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        self.before = self.view.whole("parameters")
        self.points.append(f"update {scalars['lr']}")

    def on_step_end(self, step: int, result: StepResult) -> None:
        after = self.view.whole("parameters")
        assert any(not np.array_equal(after[name], value) for name, value in self.before.items()) or not after
        self.points.append(f"end {step}")


def run(
    place: ProcessInfo, group: Communicator, strategy: str, observed: bool
) -> tuple[list[str], dict[str, np.ndarray]]:
    config = configuration(layout=layout(strategy, micro_batch=3), train={"steps": 2})
    engine, steps = started(place, group, TransformerTask(TransformerTask.Config(dropout=0.25)), config)
    noting = Noting(engine.view)
    if observed:
        engine.observe(noting)
    for number, batches in enumerate(steps):
        engine.step(batches, number, {"lr": 0.1})
    return noting.points, parameters(engine)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_every_point_is_called_in_order_and_no_bit_of_the_run_changes(strategy: str) -> None:
    world = 1 if strategy == "single" else 2
    ran = [processes.ranks(run, world, strategy, seen) for seen in (True, False)]
    for (points, mine), (nothing, reference) in zip(*ran, strict=True):
        passes = ["forward", "outputs ['next', 'length']", "backward"]
        step = ["reduction", "passes", *passes * (4 // world), "gradients", "reduction", "votes"]
        step += [f"reduced [{float(world)}]", "optimizer", "update 0.1"]
        begin = [f"begin {n} {4 // world}" for n in range(2)]
        assert points == [begin[0], *step, "end 0", begin[1], *step, "end 1"]
        assert nothing == []
        assert all(np.array_equal(mine[name], value) for name, value in reference.items())


class Refusing(Observer):
    """Rank 1 alone knows of something."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def votes(self) -> Sequence[float]:
        return [0.0, float(self.rank)]

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        return StepVerdict(GuardError(f"{votes[1]:g} rank refuses")) if votes[1] else None


def refused(place: ProcessInfo, group: Communicator) -> tuple[str, bool]:
    engine, steps = started(place, group, TransformerTask(), configuration(layout=layout("ddp")))
    before = parameters(engine)
    engine.observe(Refusing(place.rank))
    try:
        engine.step(steps[0], 0, {"lr": 0.1})
        return "", False
    except GuardError as error:
        return str(error), all(np.array_equal(before[name], value) for name, value in parameters(engine).items())


def test_what_one_rank_knows_refuses_the_step_on_all_of_them_before_the_update() -> None:
    assert processes.run(refused, 2) == [("1 rank refuses", True)] * 2


class Says(Observer):
    def __init__(self, count: int, verdict: StepVerdict | None) -> None:
        self.count, self.verdict, self.seen = count, verdict, list[float]()

    def votes(self) -> Sequence[float]:
        return [float(self.count)] * self.count

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        self.seen = list(votes)
        return self.verdict


def test_each_observer_is_given_its_own_votes_and_the_first_reason_counts() -> None:
    members = [Says(2, None), Says(0, StepVerdict(skip="a")), Says(1, StepVerdict(skip="b", recompiled="c"))]
    observers = Observers(members)
    assert observers.votes() == [2.0, 2.0, 1.0]
    result = observers.on_reduced(RESULT, [20.0, 21.0, 10.0])
    assert [member.seen for member in members] == [[20.0, 21.0], [], [10.0]]
    assert (result.skipped, result.recompiled, result.loss) == ("a", "c", 1.0)
