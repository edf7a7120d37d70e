"""What the faults of the zoo are made of: tasks, how a fault is described, and how code is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from unittest import mock

from torch import nn

from packages.unisono.tests.pairs import Paired
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.task import Task

# the tasks that they are made in --------------------------------------------------------------------------------------


class Normed(LinearTask):
    """A batch norm, whose running statistics are those of one process."""

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Frozen(LinearTask):
    """Its first layer is not trained."""

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        return model


TASKS: dict[str, Callable[[], Task]] = {
    "transformer": TransformerTask,
    "dropout": lambda: TransformerTask(TransformerTask.Config(dropout=0.25)),
    "few rows": lambda: TransformerTask(TransformerTask.Config(rows=9)),
    "batch norm": Normed,
    "frozen": Frozen,
    "averaged": TransformerTask,
    "pairs": Paired,
    "contrast": lambda: Paired(Paired.Config(loss="contrast")),
    "whole": lambda: Paired(Paired.Config(loss="whole")),
}
SETTINGS: dict[str, dict[str, Any]] = {"averaged": {"ema": {"decay": 0.9}}}  # of the configuration, by task


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        made: the context in which a run has it.
        named: what the diagnosis must call it.
        task: of `TASKS`.
        strategy: of the run.
        resumed: how often the run is interrupted and goes on.
        mark: FAIL, or ABSTAIN where no more can be said.
        twin: the task of the clean run, where the fault is in the task itself.
        micro_batch: rows of its micro-batches; those of the run on one process have two.
        new_task: whether it goes on from the checkpoint of its twin, by a task that has run nothing.
    """

    made: Callable[[], AbstractContextManager[Any]]
    named: str
    task: str = "transformer"
    strategy: str = "ddp"
    resumed: int = 0
    mark: str = "FAIL"
    twin: str = ""
    micro_batch: int = 2
    new_task: bool = False

    @property
    def clean(self) -> Fault:
        """The same run without the fault."""
        return replace(self, made=nothing, named="", mark="PASS", task=self.twin or self.task)


FAULTS: dict[str, Fault] = {}


def collector(faults: dict[str, Any], kind: type[Fault]) -> Callable[..., Any]:
    """A decorator that puts a fault of this kind into a zoo.

    With an owner and the name of one of its functions, what is decorated stands in the place of this function, which
    it is given first. Otherwise it is a generator, made a context.
    """

    def fault(name: str, named: str, *function: Any, **more: Any) -> Callable[[Any], Any]:
        def add(made: Callable[..., Any]) -> Any:
            @wraps(made)
            def replacing() -> AbstractContextManager[Any]:
                return wrapping(*function, made)

            faults[name] = kind(replacing if function else contextmanager(made), named, **more)
            return made

        return add

    return fault


fault = collector(FAULTS, Fault)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def wrapping(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Replace a function by one that is given it as its first argument."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *arguments, **named: around(original, *arguments, **named))
