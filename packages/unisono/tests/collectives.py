"""A task that talks to other ranks by itself, and makes on rank 1 what `wrong` says in one step."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from packages.unisono.tests import runs
from packages.unisono.tests.runs import configuration
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.parallel import process_group
from unisono.launch.processes.rank_process import run_and_exit
from unisono.runtime import heartbeat
from unisono.runtime.communication import collective_log
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import UnisonoError
from unisono.task import Context, Loss, Task

STEP = 2  # in which rank 1 does what is wrong; the run makes four


class Talking(Task):
    """Least squares, and sums over ranks that a user might want to see."""

    def __init__(self, place: ProcessInfo, wrong: str) -> None:
        super().__init__()
        self.rank, self.wrong = place.rank, wrong
        self.seen: list[float] = []
        self.groups: list[Any] = []
        self.before: list[torch.Tensor] = []

    def data(self) -> list[dict[str, np.ndarray]]:
        inputs = np.random.default_rng(3).normal(size=(24, 3)).astype(np.float32)
        return [{"x": x, "y": x.sum(keepdims=True)} for x in inputs]

    def held_out(self) -> list[dict[str, np.ndarray]]:
        return self.data()[:4]

    def counts(self, batch: dict[str, Any]) -> dict[str, float]:
        return {"square": float(len(batch["x"]))}

    def build(self) -> torch.nn.Module:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        return self.model

    def outputs(self, model: torch.nn.Module, batch: dict[str, Any], context: Context) -> torch.Tensor:
        unused = self.wrong == "unused" and self.rank == 1 and context.training and context.step == STEP
        if context.training and context.step == STEP:
            self.before = [parameter.detach().clone() for parameter in self.model.parameters()]
        made = model[:2](batch["x"]).sum(1, keepdim=True) if unused else model(batch["x"])
        if self.wrong == "well":
            self.talk_well()
        else:
            at = context.step == STEP if context.training else self.wrong == "evaluation"
            self.talk(self.wrong if at and self.rank == 1 else "")
        return made

    def loss(self, outputs: torch.Tensor, batch: dict[str, Any], context: Context) -> Loss:
        square = (outputs - batch["y"]).square().sum()
        return Loss(sums={"square": square}, metrics={"square": (square.detach(), float(len(outputs)))})

    def talk(self, wrong: str) -> None:
        ones, tens = torch.full((4,), 1.0 + self.rank), torch.full((4,), 10.0 + 10 * self.rank)
        op = dist.ReduceOp.MAX if wrong == "reduce" else dist.ReduceOp.SUM
        if wrong == "dtype":
            ones = ones.to(torch.int32)
        if wrong == "shape":
            ones = ones.view(2, 2)
        if wrong == "size":
            ones = torch.ones(40_000)
        if wrong == "line":
            dist.all_reduce(ones)  # another line
        elif wrong != "skip":
            dist.all_reduce(ones, op=op)  # the usual line
        if wrong == "order":
            self.of_tens(tens)
            self.of_ones()
        else:
            self.of_ones()
            self.of_tens(tens)
        if wrong == "evaluation":
            dist.all_reduce(torch.zeros(2))

    def of_ones(self) -> None:
        dist.all_reduce(torch.full((4,), 1.0 + self.rank))

    def of_tens(self, tens: torch.Tensor) -> None:
        dist.all_reduce(tens)
        self.seen.append(tens[0].item())

    def talk_well(self) -> None:
        """Everything that may look different and is right."""
        if not self.groups:
            self.groups = [dist.new_group([0, 1]), dist.new_group([0])]
        told = torch.arange(3.0)
        if self.rank == 0:  # a root sends from a line of its own
            dist.broadcast(told, 0)
            dist.all_reduce(told, group=self.groups[1])  # nobody else is in it
            dist.barrier()
        else:
            dist.broadcast(told, 0)
            dist.barrier()
        functional.all_reduce(told, "max", dist.group.WORLD).sum()
        sent, taken = ([1, 2], [1, 3]) if self.rank == 0 else ([3, 1], [2, 1])  # uneven, as of experts
        dist.all_to_all_single(torch.zeros(sum(taken), 2), torch.zeros(sum(sent), 2), taken, sent)
        work = dist.all_reduce(told, group=self.groups[0], async_op=True)
        aside = threading.Thread(target=dist.all_reduce, args=(torch.zeros(1),), kwargs={"group": self.groups[0]})
        work.wait()
        aside.start()
        aside.join()
        if self.rank == 0:
            dist.send(told, 1)
        else:
            dist.recv(told, 0)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, "ab" * self.rank)


def config_of(strategy: str = "ddp", **layout: Any) -> Any:
    launch = {"timeout": layout.pop("timeout", 20.0), **layout.pop("launch", {})}
    return configuration(
        layout={"strategy": strategy, "world_size": 2, "micro_batch": 3, **layout},
        train={"steps": 4, "global_batch": 12},
        launch=launch,
        eval={"every": 2},
        checkpoint={"every": None, "at_end": False},
    )


@dataclass
class Outcome:
    """What came of a run on one rank."""

    error: str = ""
    kind: str = "none"
    code: int = 0
    seen: list[float] = field(default_factory=list)
    loss: float | None = None
    updated: bool = False
    digests: dict[str, tuple[int, int]] = field(default_factory=dict)
    calls: list[collective_log.Call] = field(default_factory=list)


def train(
    place: ProcessInfo,
    group: Communicator,
    folder: Path,
    wrong: str,
    strategy: str = "ddp",
    number: int = 0,
    **layout: Any,
) -> Outcome:
    """Train, and tell what came of it."""
    task, outcome = Talking(place, wrong), Outcome()
    folder = folder / f"{wrong or 'clean'}-{strategy}-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    group.barrier("the folder")
    closed = CollectiveComparison.close

    def close(comparison: CollectiveComparison) -> None:
        if comparison._hooks is not None:
            members = comparison._log.groups.values()
            outcome.digests = {m.name: (m.turn, m.digest) for m in members if len(m.ranks) > 1}
            outcome.calls = comparison._log.calls()
        closed(comparison)

    CollectiveComparison.close = close  # type: ignore[method-assign]
    try:
        outcome.loss = runs.train(folder, config_of(strategy, **layout), task, place, group).loss
    except UnisonoError as error:
        outcome.kind, outcome.error, outcome.code = type(error).__name__, str(error), error.exit_code
    finally:
        CollectiveComparison.close = closed  # type: ignore[method-assign]
    outcome.seen = task.seen
    now = [parameter.detach() for parameter in task.model.parameters()]
    if strategy == "ddp":
        outcome.updated = any(not torch.equal(a, b) for a, b in zip(task.before, now, strict=True))
    return outcome


def process(rank: int, port: int, folder: Path, wrong: str) -> None:
    """One process of two that train: its ring and what it prints lie in the folder, its exit code is that of a run."""
    printed = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ[heartbeat.DIRECTORY_VARIABLE] = str(folder)
    torch.set_num_threads(1)
    place = ProcessInfo(rank, 2, rank, 2, "test")

    def work() -> None:
        group = process_group.start(place, torch.device("cpu"), timeout=20, start_timeout=60)
        runs.train(folder, config_of(), Talking(place, wrong), place, group)

    run_and_exit(work, place)
