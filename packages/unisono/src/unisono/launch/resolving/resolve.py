"""Resolves a run once: from a typed configuration to layout, micro-batch, directory and resume point.

One process does this (the launcher, or rank 0 under another launcher), refuses whatever can be refused without starting
processes, and locks the directory while the run lasts. All others receive the result as data
(`unisono.config.resolved_run`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement, provenance, resume_point
from unisono.checkpoint.core.manifest import parse_step
from unisono.checkpoint.core.resume_point import NewestCheckpoint
from unisono.checkpoint.remote import restore, upload
from unisono.config import CONFIG_FILE, batch_split, fingerprint
from unisono.config.code import foreign_run
from unisono.config.compose import ComposedConfig
from unisono.config.resolved_run import (
    RESOLVED_FILE,
    ResolvedRun,
    ResumePoint,
    absolute_references,
    digest_values,
    override_words,
)
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster
from unisono.launch.resolving import layout, preflight, run_directory
from unisono.launch.resolving.preflight import DataFacts
from unisono.runtime.console import say
from unisono.runtime.display.preparing import preparing
from unisono.runtime.errors import ConfigError, MemoryExhaustedError, RunError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object
from unisono.supervise import disk_space
from unisono.task import Task
from unisono.task_config import validate_config

# May refuse a run; called before anything is read, and again once the facts of its data are known.
StartCheck = Callable[[RunConfig, Mapping[str, Any] | None], None]


@dataclass(frozen=True)
class Request:
    """What a start was asked for.

    Attributes:
        config: Typed, with a concrete layout except for the micro-batch.
        allow: May refuse the start.
        origins: Origin of each configuration value.
        command: The words of the command; empty if there was none.
        job: Id of the job after which an unnamed run is named.
    """

    config: RunConfig
    allow: StartCheck | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    job: str | None = None


@contextmanager
def resolve_run(request: Request, task: Task) -> Iterator[ResolvedRun]:
    """Resolve a run, write its directory, and lock it against other starts while the context lasts.

    Everything that can be refused without side effects is refused first.

    Raises:
        UnisonoError: For the first problem found.
    """
    new = request.config.run.name is None and request.job is None
    config, allow = run_directory.with_name(request.config, request.job), request.allow
    fetching = restore.Restore.from_config(config, run_directory.run_path(config))
    fetching.begin(new, lambda: run_directory.hold_run(config))
    first = plan_run(config)
    planned, measured = first.config, None
    if first.resume is None and fetching.partial is None:
        preflight.check_moments(config)
    if allow is not None:
        allow(planned, None)
    if planned.layout.micro_batch == "auto":
        measured = _measure_micro_batch(planned, task)
        planned = plan_run(config, micro_batch=measured).config
    with preparing("looking at the data", shown=config.observe.progress is True):
        data = preflight.preflight(task, planned)
    task.kernels(config.layout.device, config.train.precision)
    if allow is not None:
        allow(planned, data.facts)
    if new:
        config = run_directory.claim_directory(config)
        fetching = restore.Restore.from_config(config, run_directory.run_path(config))
    with run_directory.hold_run(config):
        fetching.finish()
        run = plan_run(config, data, micro_batch=measured, held=True)  # another start may have changed it meanwhile
        run = replace(run, origins=request.origins, command=_resume_words(request.command, run.config))
        run_directory.write_run(run, data, task)
        fetching.claim()
        with preflight.report_changed_files(data.watched):
            yield run


def plan_run(
    config: RunConfig, data: DataFacts | None = None, *, micro_batch: int | None = None, held: bool = False
) -> ResolvedRun:
    """Determine the micro-batch of a run and the checkpoint it may resume from, without side effects.

    Args:
        config: Named, with a concrete layout except for the micro-batch.
        data: Of the run; None if not known yet.
        micro_batch: The measured one, for `layout.micro_batch=auto`.
        held: Whether this process holds the directory's lock, so that a damaged checkpoint may be fetched again.

    Returns:
        The run; its micro-batch is `auto` if it still has to be measured.

    Raises:
        RunError: If the directory cannot be used, or holds another run.
        CheckpointError: If no checkpoint is intact, or one has another version.
    """
    directory = run_directory.run_path(config)
    if config.launch.nodes > 1:  # each may have another working directory
        directory = directory.resolve()
    newest, past, random = _read_past(config, directory, held)
    config = _resolve_micro_batch(config, directory, past, random, micro_batch)
    if newest.checkpoint is not None and not held:
        disk_space.check_disk_space(directory, config, disk_space.newest_size(directory), 1)
    if data is not None:
        run_directory.refuse_other_data(directory, data)
    here = provenance.describe_run(config, data.facts if data else None)
    point = resume_point.decide_resume_point(directory, config, here, newest, data.steps if data else None)
    if past is not None:
        if point is None:
            provenance.check_compatible(str(directory), provenance.compare(past, here, config, random), config)
        _refuse_other_statistics(directory, past["config"], config)
    _refuse_part_without_store(config, directory, newest)  # whose run it is has been decided
    return ResolvedRun(config, directory, point)


def with_smaller_micro_batch(run: ResolvedRun, random: bool | None) -> ResolvedRun:
    """Resolve a run that ran out of memory again, with the next smaller micro-batch; its lock is held.

    Raises:
        MemoryExhaustedError: If there is no smaller one, or it would change the results.
    """
    size = next_smaller_micro_batch(run)
    if size is None:
        raise MemoryExhaustedError("the micro-batch is already one row and cannot be made smaller")
    if draws_random_numbers(run, random) and "layout.micro_batch" not in run.config.run.allow_change:
        raise MemoryExhaustedError(
            "the micro-batch was not made smaller: the forward pass draws random numbers or normalises rows together, "
            "so another micro-batch changes the results. Allow it by run.allow_change=[layout.micro_batch]"
        )
    return plan_restart(run, size)


def draws_random_numbers(run: ResolvedRun, reported: bool | None) -> bool:
    """Whether a run's micro-batch affects its results, according to its processes or its checkpoint."""
    return reported if reported is not None else run.resume is not None and run.resume.random


def plan_restart(run: ResolvedRun, micro_batch: int | None = None) -> ResolvedRun:
    """Resolve an ended run again, from the checkpoint that is newest by now; its lock is held."""
    config = run.config if micro_batch is None else _with_micro_batch(run.config, micro_batch)
    resolved = replace(plan_run(config, held=True), origins=run.origins, command=run.command)
    run_directory.write_config(resolved)
    return resolved


def next_smaller_micro_batch(run: ResolvedRun) -> int | None:
    """Return the next smaller micro-batch; None if there is none."""
    split = run.split
    of_sources = batch_split.rows_of_sources(run.config, split.global_batch)
    sizes = batch_split.divisors(math.gcd(split.passes * split.micro_batch // split.devices, *of_sources))
    return max((size for size in sizes if size < split.micro_batch), default=None)


def resolve_for_reading(config: RunConfig, directory: Path) -> ResolvedRun:
    """Resolve a run that is only read, by one process of this host, whatever layout it was trained with."""
    config = layout.on_one_process(config, max_memory_gb=None)
    config = _with_micro_batch(config, batch_split.resolve_split(config).micro_batch)
    return ResolvedRun(config, directory, resume_point.list_all(directory))


def refuse_other_run(config: RunConfig) -> None:
    """Refuse a directory that holds another run, whatever the layout, for operations other than a start (a proof).

    Raises:
        RunError: If the directory cannot be used, or holds another run.
    """
    directory = run_directory.run_path(config)
    _, past, random = _read_past(config, directory, held=False)
    if past is None:
        return
    if not isinstance(config.layout.micro_batch, int):
        previous = provenance.fill_defaults(past["config"], config)["layout"]["micro_batch"]
        config = _with_micro_batch(config, previous)
    provenance.check_compatible(
        str(directory), provenance.compare(past, provenance.describe_run(config), config, random), config
    )


def check_run(config: RunConfig, task: Task) -> tuple[ResolvedRun, DataFacts]:
    """Resolve what a start would do, without side effects; see `unisono check`."""
    config = run_directory.with_name(layout.resolve_layout(config, cluster.process_info()))
    run = plan_run(config)
    if run.resume is None:
        preflight.check_moments(config)
    data = preflight.preflight(task, run.config)
    return plan_run(config, data), data


def from_json(values: Mapping[str, Any]) -> ResolvedRun:
    """Rebuild a resolved run from its JSON values, in another process."""
    config = validate_config(ComposedConfig(dict(values["config"]), {}))
    point = ResumePoint.from_json(values["resume"])
    return ResolvedRun(config, Path(values["directory"]), point, values["origins"], tuple(values["command"]))


def accept_resolved_run(values: Mapping[str, Any], own_config: RunConfig) -> ResolvedRun:
    """Accept a resolved run from another process, provided that it imports only what this process was asked to import.

    Raises:
        ConfigError: If it names another task or other callbacks; nothing of it was imported.
    """
    for name, value in absolute_references(own_config).items():
        if values["config"].get(name) != value:
            raise ConfigError(
                f"the process that resolved the run has {name}={one_line(values['config'].get(name))}, but this one "
                f"was started with {name}={one_line(value)}: start all of them with the same value, under the same path"
            )
    return from_json(values)


def read_resolved_run(directory: Path, digest: str) -> ResolvedRun:
    """Read the resolved run that the launcher has written.

    Raises:
        RunError: If it is a different one.
        OSError: If it cannot be read.
    """
    path = directory / RESOLVED_FILE
    values = safe_paths.read_json(directory, RESOLVED_FILE, Object)
    if digest_values(values) != digest:  # checked before importing anything that it names
        raise RunError(f"{path} was replaced by another start of this run; start the run again")
    run = from_json(values)
    if run.digest != digest:
        raise RunError(f"{path}: a setting has a different value in this process than in its launcher")
    return run


# what an earlier start left behind ----------------------------------------------------------------------------------


def _read_past(
    config: RunConfig, directory: Path, held: bool
) -> tuple[NewestCheckpoint, provenance.Provenance | None, bool]:
    """Return what earlier starts left: the newest checkpoint, the run's provenance, and whether its passes are random.

    The checkpoint is the newest with a readable manifest, in the directory or being fetched from the store. The
    provenance is that of the checkpoint, else of the run's configuration; None for a new run.
    """
    run_directory.refuse_unusable(config)
    store = upload.open_store(config) if held else None
    newest = resume_point.newest_readable(
        directory / placement.NAME, None if store is None else partial(restore.refetch, store)
    )
    if config.checkpoint.upload.url is not None and (partial_restores := restore.find_partial(directory)):
        newest = NewestCheckpoint(commit.read_manifest(partial_restores[-1]))
    past: provenance.Provenance | None = None
    if (directory / CONFIG_FILE).is_file():
        if newest.checkpoint is not None:
            past = newest.checkpoint.about
        else:  # it ended before its first checkpoint
            past = {"config": foreign_run.read_values(directory / CONFIG_FILE)}
    provenance.check_names(config, past["config"] if past else None)
    return newest, past, newest.checkpoint is not None and bool(newest.checkpoint.state["random"])


def _refuse_part_without_store(config: RunConfig, directory: Path, newest: NewestCheckpoint) -> None:
    """Refuse to go on from less than what a node has a part of, since the rest is known to be in a store."""
    if config.checkpoint.upload.url is not None or not (parts := restore.find_partial(directory)):
        return
    name = parts[-1].name.removeprefix(commit.PARTIAL)
    if newest.checkpoint is None or newest.checkpoint.step < parse_step(name):
        raise RunError(
            f"{directory} has a part of {name}, whose other files are in the store of this run; set "
            f"checkpoint.upload.url, or remove {parts[-1]} to resume without it"
        )


def _resolve_micro_batch(
    config: RunConfig, directory: Path, past: provenance.Provenance | None, random: bool, measured: int | None
) -> RunConfig:
    """Return the configuration with a concrete micro-batch, unless it is `auto` and has to be measured.

    A resumed run keeps its micro-batch if it still divides the batch, and always if forward passes draw random numbers.
    """
    requested, size = config.layout.micro_batch, measured
    assert isinstance(config.layout.world_size, int)
    if isinstance(requested, int):
        size = requested
    elif past is not None:
        before = provenance.fill_defaults(past["config"], config)
        previous = before["layout"]["micro_batch"]
        if not random:  # a start that has since run out of memory may have stored a smaller one
            since = foreign_run.read_values(directory / CONFIG_FILE)["layout"]["micro_batch"]
            previous = min(previous, since) if isinstance(since, int) and isinstance(previous, int) else previous
        whole = config.layout.sync_batch_norm and fingerprint.batch_norm_rows(before) is None
        if random or config.run.resume == "exact" or (_divides(previous, config) and not whole):
            size = previous
    if size is None and requested == "auto":
        return config
    if size is None:
        size = batch_split.resolve_split(_with_micro_batch(config, None)).micro_batch
    return _with_micro_batch(config, size)


def _with_micro_batch(config: RunConfig, size: Any) -> RunConfig:
    return config.model_copy(update={"layout": config.layout.model_copy(update={"micro_batch": size})})


def _divides(micro_batch: int | str | None, config: RunConfig) -> bool:
    world = config.layout.world_size
    if not (isinstance(micro_batch, int) and isinstance(world, int)):
        return False
    return config.train.global_batch % (world * config.layout.devices_each * micro_batch) == 0


def _measure_micro_batch(config: RunConfig, task: Task) -> int:
    from unisono.launch.autobatch import search
    from unisono.launch.task_objects import refuse_state

    refuse_state(task, "the processes that measure memory build their own")
    process = cluster.process_info()
    result = search.find_micro_batch(config, config.launch.nodes == 1 and (process is None or process.world_size == 1))
    say("\n".join(result.lines()))
    return result.micro_batch


def _refuse_other_statistics(directory: Path, there: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a change of which rows are normalised together, if batch statistics are synchronised."""
    before = fingerprint.batch_norm_rows(provenance.fill_defaults(there, config))
    now = fingerprint.batch_norm_rows(config)
    if before != now and "layout.micro_batch" not in config.run.allow_change:
        raise RunError(
            f"{directory} already holds a run that normalises different rows together (layout.sync_batch_norm): "
            f"{_describe_rows(before)} there, {_describe_rows(now)} here. Keep layout.world_size and "
            "layout.micro_batch, or allow this change by run.allow_change=[layout.micro_batch]"
        )


def _describe_rows(together: tuple[int, int] | None) -> str:
    return "the whole global batch" if together is None else f"{together[1]} of each of {together[0]} processes"


def _resume_words(command: tuple[str, ...], config: RunConfig) -> tuple[str, ...]:
    """Return the words of a command that resumes the run: with its name, and without settings for one start."""
    if not command:
        return ()
    changes: dict[str, str | None] = {"run.stop_after": None}
    if command[1:2] != ("resume",):  # which names the folder
        changes["run.name"] = config.run.name
    if config.run.resume == "never":
        changes["run.resume"] = None
    return tuple(override_words(command, changes))
