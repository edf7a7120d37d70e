"""From a configuration to a running job: resolves it, starts its processes, and returns the outcome."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unisono.callback import Callback
from unisono.checkpoint.core import provenance
from unisono.config.compose import ComposedConfig, compose
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.data.loading.worker_process import WORKER_VARIABLE
from unisono.launch import cluster, exit_advice, interrupts, layout, preflight, resolve
from unisono.launch.host import host_check, memory_allocators
from unisono.launch.nodes import agreement, tcp_rendezvous
from unisono.launch.notebook import bar, cell_source
from unisono.launch.processes import local_processes, monitor_client, preloading, rank_process, restart
from unisono.launch.processes.fork_server import ForkServer
from unisono.launch.resolve import Request, StartCheck
from unisono.launch.result import RunResult
from unisono.launch.resume import compose_run
from unisono.launch.task_objects import (
    callback_entry,
    format_override,
    merge_settings,
    reference_to,
    refuse_state,
    settings_of,
    with_engine,
)
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.communication.consensus import raise_everywhere, share_first
from unisono.runtime.errors import ConfigError, Interrupted
from unisono.supervise import fault_hook, preemption
from unisono.task import Task
from unisono.task_config import build_task, composed_engine, validate_config
from unisono.training.callbacks.build import build_callbacks


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


@contextmanager
def start_fork_server(composed: ComposedConfig) -> Iterator[ForkServer | None]:
    """Start a fork server for the processes that a configuration asks for; it imports while the run is prepared.

    Args:
        composed: Not validated yet; errors in it are reported later.
    """
    values = composed.values
    requested, nodes = values.get("layout") or {}, (values.get("launch") or {}).get("nodes") or 1
    count = 0
    if cluster.process_info() is None and requested.get("strategy") not in ("single", "dp"):
        world = requested.get("world_size", "auto")
        count = world // nodes if isinstance(world, int) and isinstance(nodes, int) else _guess_process_count(requested)
    if count < 2 and nodes == 1:
        yield None
        return
    threads, reference = layout.threads_per_process(max(1, count)), str(values.get("recipe", ""))
    modules = preloading.find_libraries(reference)
    engine = composed_engine(values)
    if engine == "auto":
        engine = "jax" if preloading.is_jax(reference) else "torch"
    with local_processes.open_fork_server(count, threads, reference, modules, engine) as server:
        yield server


def _guess_process_count(layout_values: Mapping[str, Any]) -> int:
    """Guess how many processes `auto` resolves to, without importing a library that counts devices; 0 if unclear."""
    if layout_values.get("device") == "cpu":
        return 0
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


def start_run(
    config: RunConfig,
    task: Task | None = None,
    allow: StartCheck | None = None,
    *,
    origins: Mapping[str, str] | None = None,
    command: Sequence[str] = (),
    callbacks: Sequence[Callback | type[Callback] | str] = (),
    server: ForkServer | None = None,
) -> Any:
    """Resolve a typed configuration and run it, here or on processes of its own.

    Args:
        config: As given by the user.
        task: The task to train; None for the one that the configuration names.
        allow: May refuse the start.
        origins: Origin of each configuration value.
        command: The words of the user's command, if there was one.
        callbacks: Of the user, in addition to those of the configuration and the task.
        server: Forks the processes, if there are several; None starts new ones.

    Raises:
        Preempted: If the run was ended by SIGTERM or SIGUSR1.
    """
    allocator = memory_allocators.device_variables(config.layout.device)
    with preemption.handle_signals(), local_processes.environment_changed(allocator):
        memory_allocators.use_single_arena()
        process = cluster.process_info()
        requested, config = config, layout.resolve_layout(config, process)
        if process is None or process.is_first:
            layout.warn_about_layout(requested, config)
        by_other_launcher = process is not None and process.launcher != "unisono" and not layout.is_single(config)
        # Objects are used as they are if each process has its own; otherwise they are added to the configuration.
        own_objects = by_other_launcher or layout.is_single(config)
        local = [one for one in callbacks if isinstance(one, Callback) and own_objects]
        entries = [callback_entry(one) for one in callbacks if not any(one is other for other in local)]
        for callback in local:
            callback.check(config)
        config = config.model_copy(update={"callbacks": [*config.callbacks, *entries]})
        if config.layout.engine == "jax" and server is not None:  # its forks have imported torch, and JAX uses threads
            server.close()
            server = None
        request = Request(config, allow, origins or {}, tuple(command), _job_id(process))
        if by_other_launcher:
            assert process is not None
            return _run_as_rank(request, task, process, local)
        return _run_as_launcher(request, task, local, server)


def read_outcome(path: Path) -> Any:
    """Read the outcome of a run from its events."""
    from unisono.observe import events
    from unisono.training.loop import Result

    lines = events.read_events(path / "events.jsonl")
    steps = events.step_events(lines)
    last: Mapping[str, Any] = steps[-1] if steps else {"step": 0, "loss": None}
    stopped = next((event["stopped"] for event in lines if "stopped" in event and event["step"] == last["step"]), "")
    return Result(path, last["step"], last["loss"], events.last_evaluation(lines), stopped)


def _run_as_launcher(
    request: Request, task: Task | None, callbacks: Sequence[Callback], server: ForkServer | None
) -> Any:
    """Run a single process here, or start the processes of this host or node."""
    config = request.config
    if task is not None and not layout.is_single(config):
        refuse_state(task, "other processes build their own")
    task = task or build_task(config)
    if config.launch.nodes > 1:
        return _run_as_node(request, task, server)
    with (
        resolve.resolve_run(request, task) as run,
        exit_advice.explain_exit(run),
        interrupts.stop_on_interrupt(run),
        bar.show_run(run),
    ):
        local_processes.remove_old_faults(run.directory)
        if layout.is_single(config):
            return _run_as_single(run, task, callbacks)
        restart.launch_with_restarts(run, layout.threads_per_process(run.world_size), server)
        return read_outcome(run.directory)


def _run_as_single(run: ResolvedRun, task: Task, callbacks: Sequence[Callback]) -> Any:
    """Train in this process."""
    from unisono.training import loop

    fault_hook.install(0)
    process = ProcessInfo()
    with rank_process.record_errors(run.directory, process):
        all_callbacks = [*build_callbacks(run.config, task), *callbacks]
        return loop.train(task, run, process, rank_process.join_processes(run.config, process), all_callbacks)


def _run_as_rank(request: Request, task: Task | None, process: ProcessInfo, callbacks: Sequence[Callback]) -> Any:
    """Run as one of the processes that torchrun or srun started: rank 0 resolves the run, and all train."""
    from unisono.training import loop

    config, allow = request.config, request.allow
    host_check.check_host(config)
    communicator = rank_process.join_processes(config, process)
    with ExitStack() as stack:
        try:
            if allow is not None:  # on every process, since each has the code and versions of its own host
                raise_everywhere(communicator, lambda: allow(config, None), "all ranks to pass the startup checks")

            def resolve_once() -> dict[str, Any]:
                run = stack.enter_context(resolve.resolve_run(request, task or build_task(config)))
                local_processes.remove_old_faults(run.directory)
                return run.plain()

            run = resolve.accept_resolved_run(
                share_first(communicator, resolve_once, "rank 0 to resolve the run and prepare its data"), config
            )
        except Exception:
            rank_process.leave_group(communicator)
            raise
        if process.is_first:
            stack.enter_context(exit_advice.explain_exit(run, process.launcher))
        with (
            rank_process.record_errors(run.directory, process),
            monitor_client.monitor_rank(run.config, run.directory, process, communicator),
        ):
            task = task or build_task(run.config)
            all_callbacks = [*build_callbacks(run.config, task), *callbacks]
            result = loop.train(task, run, process, communicator, all_callbacks)
    rank_process.leave_group(communicator)
    return result


def _run_as_node(request: Request, task: Task, server: ForkServer | None) -> Any:
    """Run this node's processes once all nodes agree on the run; node 0 resolves it."""
    config, allow = request.config, request.allow
    launch = config.launch
    assert launch.node_rank is not None and launch.rendezvous is not None
    with ExitStack() as stack:
        nodes = stack.enter_context(
            tcp_rendezvous.connect_nodes(
                launch.node_rank, launch.nodes, launch.rendezvous, launch.start_timeout, launch.timeout, config.run.dir
            )
        )
        node = agreement.agree_on_node(nodes, config, stack)
        if allow is not None:
            raise_everywhere(nodes, lambda: allow(config, None), "all nodes to pass the startup checks", member="node")

        def resolve_once() -> list[Any]:
            run = stack.enter_context(resolve.resolve_run(request, task))
            local_processes.remove_old_faults(run.directory)
            return [run.plain(), agreement.write_token(run.directory)]

        values, token = share_first(nodes, resolve_once, "node 0 to resolve the run and prepare its data")
        path = Path(values["directory"])

        def check_and_prepare() -> dict[str, Any]:
            agreement.check_shared_directory(path, token)
            return preflight.preflight(task, config).facts  # with this host's files and caches

        facts = raise_everywhere(nodes, check_and_prepare, "all nodes to prepare the data", member="node")
        provenance.check_agreement(nodes, {"the data": facts[node.rank]}, "node")
        agreement.remove_token(path, node)
        run = resolve.accept_resolved_run(values, config)
        threads = layout.threads_per_process(run.world_size // node.count)
        with nodes.watch_nodes(), exit_advice.explain_exit(run):
            local_processes.launch(
                run.config, run.directory, threads, node=node, arguments=(run.digest,), server=server
            )
    return read_outcome(run.directory)


def _job_id(process: ProcessInfo | None) -> str | None:
    """Return the job id that names the run, so that a requeued job finds it; not in an interactive shell of a job."""
    return None if process is None or "SLURM_PTY_PORT" in os.environ else os.environ.get("SLURM_JOB_ID")
