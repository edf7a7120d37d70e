"""Checks of the host, the settings and the data that can refuse a run before its processes start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.config.batch_split import resolve_split
from unisono.config.schema.run import RunConfig
from unisono.launch.host import host_check
from unisono.optim.groups import given_moments
from unisono.runtime import secrets
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.console import say
from unisono.runtime.errors import DataError, LostError
from unisono.task import Task

if TYPE_CHECKING:
    from unisono.data.order.planning import CheckableSource


@dataclass(frozen=True)
class DataFacts:
    """What is known of a run's data before it starts.

    Attributes:
        facts: For the console and the run's directory.
        files: The files of each source that lists them.
        watched: Sources that can tell which of their files have changed since.
        steps: Of the whole run.
    """

    facts: dict[str, Any]
    files: dict[str, Any]
    watched: Sequence[CheckableSource] = ()
    steps: int | None = None


def preflight(task: Task, config: RunConfig) -> DataFacts:
    """Refuse what this host, the settings or the data do not allow; the micro-batch may be undecided.

    Raises:
        UnisonoError: For the first problem found.
    """
    from unisono.data.order.planning import build_plan, build_source, checkable_sources, source_facts, source_files
    from unisono.observe import trackers
    from unisono.optim import ema, schedules
    from unisono.training.callbacks.build import build_callbacks
    from unisono.training.callbacks.early_stopping import EarlyStopping
    from unisono.training.parts import build_benchmark, build_environment, build_held_out, gather_facts

    assert isinstance(config.layout.world_size, int)
    host_check.check_host(config)
    split = resolve_split(config)
    task.check()
    trackers.check_trackers(config.observe.trackers)
    callbacks = build_callbacks(config, task)
    for callback in callbacks:
        callback.check(config)
    _check_adapter(config)
    build_benchmark(task, config)  # refuses those that there are not
    build_environment(task, config)
    source = build_source(task, config, config.layout.world_size)
    plan = build_plan(task, source, config)
    scalars = schedules.ScheduledScalars(config, plan.steps)
    ema.check(config.ema, plan.steps)
    held_out = build_held_out(task, config, ProcessInfo(world_size=config.layout.world_size), split)
    rows = {**source_facts(source), "held_out": held_out.rows if held_out else 0, "steps": plan.steps}
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            callback.refuse_no_rows(rows["held_out"], config)
    facts = gather_facts(rows, scalars, task)
    for warning in task.data_warnings():
        say(f"unisono: WARNING: {warning}", error=True)
    return DataFacts(facts, secrets.hidden(source_files(source)), checkable_sources(source), plan.steps)


def _check_adapter(config: RunConfig) -> None:
    if config.adapter is not None:
        from unisono.engines.torch import lora

        lora.check_peft_installed(config.adapter)


def check_moments(config: RunConfig) -> None:
    """Refuse `optim.moments` that a run from the beginning could not begin with; a resumed one needs none any more.

    Raises:
        UnisonoError: If the file cannot be read, or has none.
    """
    if (path := given_moments(config.optim)) is not None:
        from unisono.engines.torch.state.moments import Moments

        Moments(path)


@contextmanager
def report_changed_files(sources: Sequence[CheckableSource]) -> Iterator[None]:
    """If a process died, name a data file that has changed: reading a truncated memory-mapped file kills the reader."""
    try:
        yield
    except LostError as error:
        try:
            for source in sources:
                source.check_files()
        except DataError as changed:
            error.args = (f"{error} {changed}",)
        raise
