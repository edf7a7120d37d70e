"""A process that runs out of memory tells the others, and all make the step again: the run is what it would be."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import processes
from tests.engines.torch.test_agreed import Products
from tests.pairs import Paired
from tests.runs import SGD, configuration, distance, whole
from tests.tasks import TransformerTask
from unisono.config.schema.run import RunConfig
from unisono.runtime.communicator import Group, Place
from unisono.runtime.errors import MemoryExhaustedError
from unisono.task import Context, Task
from unisono.training.loop import Training

STEPS, FAILS = 4, 2  # which step


@dataclass(frozen=True)
class Strike:
    """When memory ends: on which ranks, in which of their passes with so many rows (from 0), and in what part of it."""

    ranks: tuple[int, ...] = (1,)
    turn: int = 0
    part: str = "forward"  # backward | loss
    module: str = ""  # in the backward pass: behind the outputs of this one


strike: Strike | None = None
struck: list[str] = []
turns = 0
PLACE = Place()


def out_of_memory(*_: Any) -> None:
    struck.append("struck")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Striking(Task):
    """Mixed into a task: it runs out of memory when it is told to."""

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        global turns
        due = strike is not None and context.training and context.step == FAILS and PLACE.rank in strike.ranks
        mine = due and not struck and turns == strike.turn
        turns += due
        if not mine or strike.part == "loss":
            return super().outputs(model, batch, context)
        if strike.part == "forward":
            out_of_memory()
        module = model.get_submodule(strike.module)
        handle = module.register_forward_hook(lambda _, __, made: made.register_hook(out_of_memory) and None)
        outputs = super().outputs(model, batch, context)
        handle.remove()
        return outputs

    def loss(self, outputs: Any, batch: Any, context: Context) -> Any:
        due = strike is not None and strike.part == "loss" and PLACE.rank in strike.ranks
        if due and context.training and context.step == FAILS and not struck:
            out_of_memory()
        return super().loss(outputs, batch, context)


class Words(Striking, TransformerTask):
    pass


class Pairs(Striking, Paired):
    pass


class Totals(Striking, Products):
    pass


class Counted(Words):
    """Its model counts its passes."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_buffer("passes", torch.zeros(()))
        return model

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        outputs = super().outputs(model, batch, context)
        if context.training:
            model.passes += 1
        return outputs


class Halves(Words):
    """Has a part that no row uses."""

    def build(self) -> nn.Module:
        model = super().build()
        model.unused = nn.Linear(3, 3)
        return model


@dataclass
class Made:
    """What a run came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    micro_batch: int = 0
    struck: bool = False
    error: str = ""


def made(place: Place, group: Group, task: Task, config: RunConfig, when: Strike | None) -> Made:
    """Train; every rank returns what it came to on this rank."""
    global strike, turns, PLACE
    strike, turns, PLACE = when, 0, place
    struck.clear()
    result = Made()
    with Training(task, config, place, group, Path("nowhere"), writing=False) as training:
        try:
            for step in training.steps():
                result.losses.append(step.loss)
                result.norms.append(step.grad_norm)
        except MemoryExhaustedError as error:
            result.error = str(error)
        model = training._engine._step.model  # type: ignore[attr-defined]
        result.parameters = {name: whole(value) for name, value in model.named_parameters()}
        result.evaluation = training.evaluated
        result.micro_batch, result.struck = training._split.micro_batch, bool(struck)
    return result


def every(place: Place, group: Group, cases: dict[str, Any]) -> dict[str, Made]:
    return {name: made(place, group, *case) for name, case in cases.items()}


def config(micro: int | None = None, allowed: bool = False, **layout: Any) -> RunConfig:
    return configuration(
        layout={"strategy": "ddp", "world_size": 2, "micro_batch": micro, "bucket_mb": 1e-4, **layout},
        train={"steps": STEPS, "global_batch": 12, "precision": "fp64", "guard_every": 1},
        optim=SGD,  # Adam would divide the noise of a gradient that is zero by itself
        run={"name": "test", "allow_change": ["layout.micro_batch"] if allowed else []},
        checkpoint={"at_end": False},
    )


def pairs(loss: str) -> Task:
    return Pairs(Paired.Config(loss=loss))


WORDS = Words(TransformerTask.Config())
HALVES = Halves(TransformerTask.Config())
MIDDLE = "blocks.0"  # all that comes behind it has its gradients by then, and what comes before it has not
CASES: dict[str, tuple[Task, RunConfig, Strike]] = {
    "first pass": (WORDS, config(2), Strike()),
    "last pass": (WORDS, config(2), Strike(turn=2)),
    "only pass": (WORDS, config(), Strike()),
    "loss": (WORDS, config(2), Strike(part="loss")),
    "all ranks": (WORDS, config(2), Strike((0, 1), turn=1)),
    "rank 0": (WORDS, config(), Strike((0,))),
    "backward of the first": (WORDS, config(2), Strike(turn=0, part="backward", module=MIDDLE)),
    "backward of the last": (WORDS, config(2), Strike(turn=2, part="backward", module=MIDDLE)),
    "backward of the only": (WORDS, config(), Strike(part="backward", module=MIDDLE)),
    "ordered, first": (WORDS, config(3, reduction="ordered"), Strike()),
    "ordered, backward": (WORDS, config(3, reduction="ordered"), Strike(turn=1, part="backward", module=MIDDLE)),
    "unused": (HALVES, config(2), Strike(turn=1)),
    "unused, backward": (HALVES, config(2), Strike(turn=2, part="backward", module=MIDDLE)),
    "totals, first pass": (Totals(), config(2), Strike()),
    "totals, second pass": (Totals(), config(2), Strike(turn=5)),
    "rows, only": (pairs("distance"), config(), Strike()),
    "rows, loss": (pairs("contrast"), config(2), Strike(part="loss")),
    "rows, only loss": (pairs("distance"), config(), Strike(part="loss")),
    "rows, first pass": (pairs("distance"), config(2), Strike(turn=1)),
    "rows, second pass": (pairs("distance"), config(2), Strike(turn=4, part="backward", module="1")),
    "whole, only": (pairs("whole"), config(), Strike()),
    "whole, loss": (pairs("whole"), config(3), Strike(part="loss")),
    "whole, second pass": (pairs("whole"), config(3), Strike(turn=3)),
}
REFUSED: dict[str, tuple[Task, RunConfig, Strike]] = {
    "dropout": (Words(TransformerTask.Config(dropout=0.1)), config(2), Strike(turn=1)),
    "buffer": (Counted(TransformerTask.Config()), config(2), Strike(turn=1)),
    "one row": (WORDS, config(1), Strike()),
}
ALLOWED = (Words(TransformerTask.Config(dropout=0.1)), config(2, allowed=True), Strike(turn=1))


def without(name: str) -> str:
    """The run of a case with memory enough, which several cases share."""
    task, config, _ = CASES[name]
    return f"never {type(task).__name__} {task.config} {config.layout}"


QUICK = ("last pass", "backward of the last", "ordered, first", "totals, first pass", "rows, only")
SLOW = tuple(name for name in CASES if name not in QUICK)


@functools.cache
def runs(quick: bool) -> list[dict[str, Made]]:
    """Cases by rank, and each as it is with memory enough."""
    chosen = QUICK if quick else SLOW
    struck = {name: CASES[name] for name in chosen}
    if quick:
        struck |= {**{f"refused {name}": case for name, case in REFUSED.items()}, "allowed": ALLOWED}
    never = {without(name): (*CASES[name][:2], None) for name in chosen}
    return processes.run(every, 2, struck | never)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_run_is_what_it_would_have_been(name: str) -> None:
    given = CASES[name][1].layout.micro_batch or 6
    ranks = runs(name in QUICK)
    for rank, mine, never in ((rank, done[name], done[without(name)]) for rank, done in enumerate(ranks)):
        assert mine.struck == (rank in CASES[name][2].ranks), "vacuous"
        assert not mine.error
        assert (never.micro_batch, mine.micro_batch) == (given, {6: 3, 3: 2, 2: 1}[given])
        assert len(set(never.losses)) == STEPS
        assert mine.losses == pytest.approx(never.losses, rel=1e-12)
        assert mine.norms == pytest.approx(never.norms, rel=1e-12)
        assert mine.evaluation == pytest.approx(never.evaluation, rel=1e-12)
        assert max(distance(mine.parameters, never.parameters).values()) < 1e-12


def test_in_one_order_it_is_the_same_bit_for_bit() -> None:
    mine = runs(True)[0]["ordered, first"]
    assert all(np.array_equal(mine.parameters[k], v) for k, v in runs(True)[1]["ordered, first"].parameters.items())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dropout", "draws random numbers"),
        ("buffer", "rank 1, step 3: out of memory with 2 rows"),
        ("one row", "there is none"),
    ],
)
def test_where_it_would_be_another_run_all_processes_end_together(name: str, why: str) -> None:
    mine = [done[f"refused {name}"] for done in runs(True)]
    assert [one.struck for one in mine] == [False, True]
    assert mine[0].error == mine[1].error
    assert why in mine[0].error
    assert len(mine[0].losses) == FAILS


def test_where_it_is_allowed_it_goes_on_as_another() -> None:
    assert [done["allowed"].micro_batch for done in runs(True)] == [1, 1]
    assert [len(done["allowed"].losses) for done in runs(True)] == [STEPS, STEPS]
    assert runs(True)[0]["allowed"].losses == runs(True)[1]["allowed"].losses
