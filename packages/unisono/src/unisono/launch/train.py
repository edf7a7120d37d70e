"""`unisono.train` and `unisono.resume`: from a task and settings to a run, and its result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.callback import Callback
from unisono.config.compose import ComposedConfig, compose
from unisono.config.schema.run import RunConfig
from unisono.data.loading.worker_process import WORKER_VARIABLE
from unisono.launch import cluster
from unisono.launch.notebook import cell_source
from unisono.launch.result import RunResult
from unisono.launch.resume import compose_run
from unisono.launch.start import start_fork_server, start_run
from unisono.launch.task_objects import (
    format_override,
    merge_settings,
    reference_to,
    refuse_state,
    settings_of,
    with_engine,
)
from unisono.runtime.errors import ConfigError, Interrupted
from unisono.task import Task
from unisono.task_config import validate_config


def train(
    task: Task | type[Task] | str,
    config: RunConfig | Mapping[str, Any] | Sequence[str] = (),
    *,
    callbacks: Sequence[Callback | type[Callback] | str] = (),
) -> RunResult:
    """Train a task, as `unisono train` does.

    Args:
        task: A `Task`, its class, or what the command line takes: a recipe's name or `path/to/file.py:Class`. With
            several processes the others import the class from its file, so it must be defined at the top level of one,
            or in a cell of a notebook, and build the object from its settings, so it must have no other state.
        config: A `RunConfig`; or overrides, as `key=value` strings or as a dictionary of dotted keys.
        callbacks: Called after steps, evaluations and saves, and at the end, in addition to those of the configuration
            and the task. With several processes the others build them in the same way as the task.

    Returns:
        How it ended, with its curves (`history`, `plot()`) and the trained `model`.

    Raises:
        UnisonoError: For anything the caller can fix.

    Example:
        result = unisono.train(MyTask(MyTask.Config(width=64)), {"train.steps": 100, "layout.world_size": 2})
    """
    _refuse_inside_run()
    instance = task if isinstance(task, Task) else None
    kind = type(task) if isinstance(task, Task) else task
    cell = cell_source.read_class(kind)
    reference = kind if isinstance(kind, str) else cell.file if cell is not None else reference_to(kind)
    settings = settings_of(instance) if instance is not None else {}
    if isinstance(config, RunConfig):  # its task groups may be untyped, or differ from those of the task object
        values = config.model_dump(mode="json", exclude_unset=True)
        composed = ComposedConfig({**values, **merge_settings(settings, values), "recipe": reference}, {})
    else:
        composed = compose(reference, _format_overrides(config), settings=settings)
    if not isinstance(kind, str):
        composed = with_engine(composed, kind)
    if cell is not None:
        composed = cell.written_for(composed)
    with _explain_early_interrupt(), start_fork_server(composed) as server:
        run_config = validate_config(composed)
        if instance is not None and settings_of(instance) != settings_of(run_config):
            refuse_state(instance, "the configuration changes its settings, so a new object is built")
            instance = None  # all processes build their own
        allow = None if cell is None else cell.check_start
        result = start_run(run_config, instance, allow, origins=composed.origins, callbacks=callbacks, server=server)
    return RunResult.of(result, reference if isinstance(kind, str) else kind)


def resume(
    folder: Path | str,
    config: Mapping[str, Any] | Sequence[str] = (),
    *,
    callbacks: Sequence[Callback | type[Callback] | str] = (),
    trust: bool = False,
) -> RunResult:
    """Resume a run from its newest checkpoint with its own configuration, as `unisono resume` does.

    A run that was started with a task object or callbacks that have state of their own needs these: call `train` with
    them and the run's name.

    Args:
        folder: Of the run.
        config: Settings that change, as for `train`.
        callbacks: As for `train`, in addition to those of the run's configuration.
        trust: Whether a run that somebody else made may be resumed. That runs its author's code.

    Returns:
        As `train`.

    Raises:
        UnisonoError: For anything the caller can fix.

    Example:
        result = unisono.resume("runs/one", {"train.steps": 2000})
    """
    _refuse_inside_run()
    composed = compose_run(Path(folder), _format_overrides(config), trust=trust)
    with _explain_early_interrupt(), start_fork_server(composed) as server:
        run_config = validate_config(composed)
        result = start_run(run_config, origins=composed.origins, callbacks=callbacks, server=server)
    return RunResult.of(result, run_config.recipe)


@contextmanager
def _explain_early_interrupt() -> Iterator[None]:
    """Say that nothing was begun; an interrupt of a run that has begun says what is saved.

    Raises:
        Interrupted: Instead of another KeyboardInterrupt.
    """
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted before the run began, so nothing was changed") from error


def _format_overrides(config: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Overrides as the command line has them."""
    given = config.items() if isinstance(config, Mapping) else ()
    return [f"{key}={format_override(value)}" for key, value in given] or list(config)


def _refuse_inside_run() -> None:
    """Refuse to start a run while a process of another one imports the file that starts it."""
    process = cluster.process_info()
    if (process is not None and process.launcher == "unisono") or WORKER_VARIABLE in os.environ:
        raise ConfigError(
            "unisono.train was called while a process of a run imported the task's file. Put the call under "
            "`if __name__ == '__main__':`"
        )
