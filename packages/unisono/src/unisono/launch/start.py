"""Starts a job: resolves its configuration to a run, and trains it here or on processes of its own.

| this process is | who resolves the run | where it is trained |
|---|---|---|
| alone, as the layout has one process | it | here |
| to start the processes of its host | it | in those, which are started again after a fault |
| to start the processes of one of several nodes | that of node 0 | in those |
| one that torchrun or srun has started | rank 0 | here |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unisono.callback import Callback
from unisono.checkpoint.core import provenance
from unisono.config.compose import ComposedConfig
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster, exit_advice, interrupts
from unisono.launch.host import host_check, memory_allocators
from unisono.launch.nodes import agreement, own_folder, tcp_rendezvous
from unisono.launch.notebook import bar
from unisono.launch.processes import local_processes, monitor_client, preloading, rank_process, restart
from unisono.launch.processes.fork_server import ForkServer
from unisono.launch.resolving import layout, preflight, resolve
from unisono.launch.resolving.resolve import Request, StartCheck
from unisono.launch.task_objects import callback_entry, refuse_state
from unisono.runtime.communication.communicator import Channel, Communicator, Json, ProcessInfo
from unisono.runtime.communication.consensus import raise_everywhere, run_everywhere, share_first
from unisono.supervise import fault_hook, preemption
from unisono.task import Task
from unisono.task_config import build_task, composed_engine
from unisono.training.callbacks.build import build_callbacks


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
        Preempted: If the run was ended by SIGTERM, SIGUSR1 or SIGHUP.
    """
    allocator = memory_allocators.device_variables(config.layout.device)
    with preemption.handle_signals(), local_processes.environment_changed(allocator):
        memory_allocators.use_single_arena()
        process = cluster.process_info()
        requested, config = config, layout.resolve_layout(config, process)
        if process is None or process.is_first:
            layout.warn_about_layout(requested, config)
        is_single = layout.is_single(config)
        is_rank = process is not None and process.launcher != "unisono" and not is_single
        config, own = _add_callbacks(config, callbacks, is_single or is_rank)
        if config.layout.engine == "jax" and server is not None:  # its forks have imported torch, and JAX uses threads
            server.close()
            server = None
        request = Request(config, allow, origins or {}, tuple(command), _job_id(process))
        if process is not None and is_rank:
            return _train_as_rank(request, task, process, own)
        if task is not None and not is_single:
            refuse_state(task, "other processes build their own")
        task = task or build_task(config)
        if is_single and config.launch.nodes == 1:
            return _train_alone(request, task, own)
        return (_launch if config.launch.nodes == 1 else _launch_on_node)(request, task, server)


def read_outcome(path: Path) -> Any:
    """Read the outcome of a run from its events."""
    from unisono.observe import events
    from unisono.training.loop import Result

    file = path / "events.jsonl"
    lines = events.read_events(file) if file.exists() else []  # on node 0 alone, if nodes have their own folders
    steps = events.step_events(lines)
    last: Mapping[str, Any] = steps[-1] if steps else {"step": 0, "loss": None}
    stopped = next((event["stopped"] for event in lines if "stopped" in event and event["step"] == last["step"]), "")
    return Result(path, last["step"], last["loss"], events.last_evaluation(lines), stopped)


def _add_callbacks(
    config: RunConfig, callbacks: Sequence[Callback | type[Callback] | str], own_objects: bool
) -> tuple[RunConfig, list[Callback]]:
    """Use objects as they are if each process has its own; name all others in the configuration."""
    own = [one for one in callbacks if isinstance(one, Callback) and own_objects]
    entries = [callback_entry(one) for one in callbacks if not any(one is other for other in own)]
    for callback in own:
        callback.check(config)
    return config.model_copy(update={"callbacks": [*config.callbacks, *entries]}), own


# the four starts ------------------------------------------------------------------------------------------------------


def _train_alone(request: Request, task: Task, callbacks: Sequence[Callback]) -> Any:
    """Resolve the run and train it in this process."""
    with _resolve_interactively(request, task) as run:
        fault_hook.install(0)
        process = ProcessInfo()
        with rank_process.record_errors(run.directory, process):
            return _train(run, task, process, rank_process.join_processes(run.config, process), callbacks)


def _launch(request: Request, task: Task, server: ForkServer | None) -> Any:
    """Resolve the run and start the processes of this host, again after a fault that this can help."""
    with _resolve_interactively(request, task) as run:
        restart.launch_with_restarts(run, layout.threads_per_process(run.world_size), server)
        return read_outcome(run.directory)


def _launch_on_node(request: Request, task: Task, server: ForkServer | None) -> Any:
    """Start this node's processes once all nodes agree on the run, which node 0 resolves."""
    config, launch = request.config, request.config.launch
    assert launch.node_rank is not None and launch.rendezvous is not None
    own_folder.check_token(config)
    with ExitStack() as stack:
        nodes = stack.enter_context(
            tcp_rendezvous.connect_nodes(
                launch.node_rank, launch.nodes, launch.rendezvous, launch.start_timeout, launch.timeout, config.run.dir
            )
        )
        node = agreement.agree_on_node(nodes, config, stack)

        def resolve_once() -> list[Any]:
            run = _resolve(request, task, stack)
            shared = None if launch.shared_folder else own_folder.describe_resume(run)
            return [run.plain(), agreement.write_token(run.directory), shared]

        values, token, shared = _resolve_together(nodes, request, resolve_once, "node")
        run: ResolvedRun

        def accept() -> None:
            nonlocal run
            run = resolve.accept_resolved_run(values, config)
            if launch.shared_folder:
                agreement.check_shared_directory(run.directory, token)
            elif node.rank:
                run = own_folder.take_over(run, config, shared["owner"], token, stack)
            else:
                run = own_folder.from_newest_alone(run)

        def prepare() -> dict[str, Any]:
            return preflight.preflight(task, config).facts  # with this host's files and caches

        raise_everywhere(nodes, accept, "all nodes to see the run's folder", member="node")
        if not launch.shared_folder:
            fetch = partial(own_folder.fetch_checkpoint, run, shared["manifest"] if node.rank else None)
            run_everywhere(nodes, fetch, "all nodes to fetch the checkpoint", member="node")
        facts = raise_everywhere(nodes, prepare, "all nodes to prepare the data", member="node")
        provenance.check_agreement(nodes, {"the data": facts[node.rank]}, "node")
        agreement.remove_token(run.directory, node)
        threads = layout.threads_per_process(run.world_size // node.count)
        with nodes.watch_nodes(), exit_advice.explain_exit(run):
            local_processes.launch(
                run.config, run.directory, threads, node=node, arguments=(run.digest,), server=server
            )
        if not launch.shared_folder and node.rank == 0:
            own_folder.complete_newest(run)
    return read_outcome(run.directory)


def _train_as_rank(request: Request, task: Task | None, process: ProcessInfo, callbacks: Sequence[Callback]) -> Any:
    """Train as one of the processes that another launcher started, on the run that rank 0 resolves."""
    config = request.config
    host_check.check_host(config)
    communicator = rank_process.join_processes(config, process)
    with ExitStack() as stack:
        try:

            def resolve_once() -> dict[str, Any]:
                return _resolve(request, task or build_task(config), stack).plain()

            run = resolve.accept_resolved_run(_resolve_together(communicator, request, resolve_once, "rank"), config)
        except Exception:
            rank_process.leave_group(communicator)
            raise
        if process.is_first:
            stack.enter_context(exit_advice.explain_exit(run, process.launcher))
        with (
            rank_process.record_errors(run.directory, process),
            monitor_client.monitor_rank(run.config, run.directory, process, communicator),
        ):
            result = _train(run, task or build_task(run.config), process, communicator, callbacks)
    rank_process.leave_group(communicator)
    return result


def _resolve(request: Request, task: Task, stack: ExitStack) -> ResolvedRun:
    """Resolve the run, and hold it until the stack is left."""
    run = stack.enter_context(resolve.resolve_run(request, task))
    local_processes.remove_old_faults(run.directory)
    return run


@contextmanager
def _resolve_interactively(request: Request, task: Task) -> Iterator[ResolvedRun]:
    """Resolve the run on the one host that somebody may be watching."""
    with ExitStack() as stack:
        run = _resolve(request, task, stack)
        for around in (exit_advice.explain_exit, interrupts.stop_on_interrupt, bar.show_run):
            stack.enter_context(around(run))
        yield run


def _resolve_together(members: Channel, request: Request, resolve_once: Callable[[], Json], member: str) -> Any:
    """Have the first of all ranks or nodes resolve the run, once the startup checks have passed on each."""
    allow = request.allow
    if allow is not None:  # on every one, since each has the code and versions of its own host
        check = f"all {member}s to pass the startup checks"
        raise_everywhere(members, lambda: allow(request.config, None), check, member=member)
    return share_first(members, resolve_once, f"{member} 0 to resolve the run and prepare its data")


def _train(
    run: ResolvedRun, task: Task, process: ProcessInfo, communicator: Communicator, callbacks: Sequence[Callback]
) -> Any:
    from unisono.training import loop

    return loop.train(task, run, process, communicator, [*build_callbacks(run.config, task), *callbacks])


def _job_id(process: ProcessInfo | None) -> str | None:
    """Return the job id that names the run, so that a requeued job finds it; not in an interactive shell of a job."""
    return None if process is None or "SLURM_PTY_PORT" in os.environ else os.environ.get("SLURM_JOB_ID")


# the fork server ------------------------------------------------------------------------------------------------------


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
