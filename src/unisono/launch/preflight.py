"""Everything about this host, the numbers and the data that can be refused before processes start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.config import secrets
from unisono.config.batch_split import split_of
from unisono.config.schema.run import RunConfig
from unisono.launch.host import host_check
from unisono.runtime.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError, DataError, LostError
from unisono.task import Task

if TYPE_CHECKING:
    from unisono.data.order.planning import Watched


@dataclass(frozen=True)
class DataFacts:
    """What is known of a run's data before it starts.

    Attributes:
        facts: for the console and for the run's directory.
        files: of each source that lists them.
        watched: the sources that can say which of their files has changed since.
        steps: of the whole run.
    """

    facts: dict[str, Any]
    files: dict[str, Any]
    watched: Sequence[Watched] = ()
    steps: int | None = None


def preflight(task: Task, config: RunConfig) -> DataFacts:
    """Refuse what this host, the settings or the data do not allow.

    Args:
        task: that is trained.
        config: with a concrete layout; its micro-batch may be open.

    Raises:
        UnisonoError: for the first thing that cannot be.
    """
    from unisono.data.order.planning import facts_of, files_of, plan_of, source_of, watched
    from unisono.observe import trackers
    from unisono.optim import ema, schedules
    from unisono.training.callbacks.build import build_callbacks
    from unisono.training.parts import held_out_of

    assert isinstance(config.layout.world_size, int)
    host_check.check(config)
    split = split_of(config)
    task.check()
    trackers.check(config.observe.trackers)
    for callback in build_callbacks(config, task):
        callback.check(config)
    _check_adapter(config)
    source = source_of(task, config, config.layout.world_size)
    plan = plan_of(task, source, config)
    schedules.Scalars(config, plan.steps)
    ema.check(config.ema, plan.steps)
    held_out = held_out_of(task, config, ProcessInfo(world_size=config.layout.world_size), split)
    rows = {**facts_of(source), "held_out": held_out.rows if held_out else 0, "steps": plan.steps}
    facts = secrets.hidden({**rows, **task.facts()})
    return DataFacts(facts, secrets.hidden(files_of(source)), watched(source), plan.steps)


def _check_adapter(config: RunConfig) -> None:
    """Refuse adapters where they cannot be had."""
    if config.adapter is None:
        return
    if config.layout.engine == "jax":
        raise ConfigError("adapter=lora belongs to layout.engine=torch; a JAX task trains what `frozen` leaves")
    from unisono.engines.torch import lora

    lora.check(config.adapter)


@contextmanager
def naming_changed_files(sources: Sequence[Watched]) -> Iterator[None]:
    """Name the file that has changed where a process died by reading it: one that became shorter kills its reader."""
    try:
        yield
    except LostError as error:
        try:
            for source in sources:
                source.check_files()
        except DataError as changed:
            error.args = (f"{error} {changed}",)
        raise
