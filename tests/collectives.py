"""A task that talks to other ranks by itself, and makes on rank 1 what `wrong` says in one step.

Run as a module it is one process of a job: `python -m tests.collectives RANK WORLD PORT FOLDER WRONG STRATEGY`.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.runs import configuration
from unisono import trainer
from unisono.place import Group, Place
from unisono.task import Context, Loss, Task

STEP = 2  # in which rank 1 does what is wrong; the run makes four


class Talking(Task):
    """Least squares, and sums over ranks that a user might want to see."""

    def __init__(self, place: Place, wrong: str) -> None:
        super().__init__()
        self.rank, self.wrong = place.rank, wrong
        self.seen: list[float] = []
        self.groups: list[Any] = []

    def data(self) -> list[dict[str, np.ndarray]]:
        inputs = np.random.default_rng(3).normal(size=(24, 3)).astype(np.float32)
        return [{"x": x, "y": x.sum(keepdims=True)} for x in inputs]

    def held_out(self) -> list[dict[str, np.ndarray]]:
        return self.data()[:4]

    def counts(self, batch: dict[str, Any]) -> dict[str, float]:
        return {"square": float(len(batch["x"]))}

    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def outputs(self, model: torch.nn.Module, batch: dict[str, Any], context: Context) -> torch.Tensor:
        made = model(batch["x"])
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
        ones, threes = torch.full((4,), 1.0 + self.rank), torch.full((4,), 10.0 + 10 * self.rank)
        if wrong == "order":
            ones, threes = threes, ones
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
        if wrong == "order":  # of equal shape, so nobody notices, but made from the lines of each other
            self.of_threes(ones)
            self.of_ones(threes)
        else:
            self.of_ones(ones)
            self.of_threes(threes)
        if wrong == "evaluation":
            dist.all_reduce(torch.zeros(2))

    def of_ones(self, ones: torch.Tensor) -> None:
        dist.all_reduce(ones.float().view(-1)[:4].clone())

    def of_threes(self, threes: torch.Tensor) -> None:
        dist.all_reduce(threes)
        self.seen.append(threes[0].item())

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


def train(place: Place, group: Group, folder: Path, wrong: str, strategy: str = "ddp", **layout: Any) -> Any:
    """Train and return the result and what the task has seen, or the error."""
    task = Talking(place, wrong)
    folder = folder / f"{wrong or 'clean'}-{strategy}-{len(layout)}"
    folder.mkdir(parents=True, exist_ok=True)
    group.barrier("the folder")
    try:
        return trainer.run(task, config_of(strategy, **layout), place, group, folder), task.seen
    except Exception as error:
        return error


def main() -> None:
    from unisono.engines.torch import collective
    from unisono.launch.worker import guarded

    rank, world, port, folder, wrong, strategy = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    place = Place(int(rank), int(world), int(rank), int(world), "test")

    def work() -> None:
        group = collective.start(place, torch.device("cpu"), timeout=20, start_timeout=60)
        result = train(place, group, Path(folder), wrong, strategy)
        if isinstance(result, Exception):
            raise result

    guarded(work, place)


if __name__ == "__main__":
    main()
