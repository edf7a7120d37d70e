"""The processes of a run on this host: started together, watched, and ended together, with one fault to report.

With several nodes, each launcher knows only its own processes; rank 0 listens at an address that the nodes agreed on.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from unisono.checkpoint.core import commit, placement
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster
from unisono.launch.host import memory_allocators
from unisono.launch.nodes import network
from unisono.launch.processes import children, fork_server
from unisono.launch.processes.children import ChildProcesses
from unisono.launch.processes.exit_report import LostWorkerError as LostWorkerError
from unisono.launch.processes.exit_report import StuckWorkerError as StuckWorkerError
from unisono.launch.processes.exit_report import WorkerError as WorkerError
from unisono.launch.processes.exit_report import select_fault
from unisono.launch.processes.fork_server import ForkServer
from unisono.launch.processes.monitor_client import MonitorClient, build_client, make_memory_directory
from unisono.runtime import heartbeat
from unisono.runtime.communication.authenticated_line import TOKEN
from unisono.runtime.communication.communicator import STORE_VARIABLE, Node
from unisono.runtime.communication.listening import reserve_port
from unisono.runtime.console import say
from unisono.runtime.errors import LostError, Preempted, UnavailableError
from unisono.runtime.untrusted import safe_writing
from unisono.supervise import preemption
from unisono.supervise.hangs.hang_detection import describe_death

TRAINING_MODULE = "unisono.launch.processes.rank_process"
# Signals that end all processes; those of `preemption` are handled by the processes themselves.
INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGQUIT)


def launch(
    config: RunConfig,
    folder: Path,
    threads: int,
    module: str = TRAINING_MODULE,
    node: Node | None = None,
    arguments: Sequence[str] = (),
    server: ForkServer | None = None,
    processes: int | None = None,
) -> None:
    """Start this node's share of the `layout.world_size` processes of a run, and wait for them.

    Args:
        config: Concrete.
        folder: The run's directory, first argument of the processes.
        threads: CPU threads per process, unless the user's environment sets them.
        module: What each process runs.
        node: This node, if there are several.
        arguments: Of the processes, after the folder.
        server: Forks the processes; None starts new processes.
        processes: How many, if that is not what the layout says.

    Raises:
        WorkerError: With the text and the exit code of the first fault.
        KeyboardInterrupt: After all processes have ended.
        Preempted: If this process was asked to end, and all processes have ended.
    """
    assert isinstance(config.layout.world_size, int)
    loopback = config.layout.device == "cpu"
    count = processes or config.layout.world_size // (node.count if node else 1)
    first = node.rank * count if node else 0
    watch = (
        build_client(config, folder, range(first, first + count), node.rank if node else 0)
        if module == TRAINING_MODULE
        else None
    )
    started: list[ChildProcesses] = []

    def kill_all() -> None:
        for one in started:
            one.send_signal(signal.SIGKILL)

    with (
        preemption.forward_signals(
            lambda: [pid for one in started for pid in one.living], kill_all, config.launch.preempt_deadline
        ) as was_preempted,
        watch or nullcontext(),
    ):
        try:
            run_processes(
                module, folder, count, threads, config.recipe, loopback, node, watch, _signals_to_collect(),
                arguments=arguments, server=server, started=started, authenticated=config.layout.engine == "jax",
            )  # fmt: skip
        except WorkerError as error:
            if was_preempted() and error.by_signal:  # killed before they could react, or long after their deadline
                raise _preempted_error(folder) from None
            raise


def run_processes(
    module: str,
    folder: Path,
    count: int,
    threads: int,
    reference: str,
    loopback: bool,
    node: Node | None = None,
    watch: MonitorClient | None = None,
    signals: Sequence[int] = (signal.SIGTERM, signal.SIGHUP, *INTERRUPT_SIGNALS),
    shares_port: bool = True,
    arguments: Sequence[str] = (),
    server: ForkServer | None = None,
    started: list[ChildProcesses] | None = None,
    authenticated: bool = False,
) -> None:
    """Start processes that each run a module, with a folder as first argument, and wait for them.

    Args:
        module: E.g. `unisono.launch.processes.rank_process`.
        folder: What the processes read, and where they write their logs.
        count: Number of processes on this node.
        threads: CPU threads per process, unless the user's environment sets them.
        reference: Reference to the user's code, as `path/to/file.py:name` or `module:name`.
        loopback: Whether gloo should stay inside this host; with a single node only.
        node: This node, if there are several; the caller has then removed earlier faults.
        watch: The monitor that reads the processes' heartbeats.
        signals: Signals to this process that end all of them.
        shares_port: Whether rank 0 listens through `process_group.start`, which can share the reserved port; any other
            listener would find it in use.
        arguments: Of the processes, after the folder.
        server: Forks the processes; None starts new processes.
        started: Receives the processes once they exist.
        authenticated: Whether the processes meet without torch, and prove to each other that they share a launcher.

    Raises:
        WorkerError: With the text and the exit code of the first fault.
        KeyboardInterrupt: After all processes have ended.
    """
    with ExitStack() as stack:
        address = network.find_loopback() if node is None else ""
        if node is None:
            remove_old_faults(folder)
            reserved = stack.enter_context(reserve_port(address))
            meet_at = address, reserved.getsockname()[1]
            if not shares_port:
                reserved.close()
        else:
            meet_at = node.host, node.port
        common = {**process_variables(threads, reference), **_address_variables(meet_at, loopback, node)}
        if watch is not None:
            common[heartbeat.DIRECTORY_VARIABLE] = str(watch.directory)
        if node is None and shares_port:
            private = watch.directory if watch is not None else make_memory_directory()
            if watch is None:
                stack.callback(shutil.rmtree, private, ignore_errors=True)
            common[STORE_VARIABLE] = str(private / "store")
        if authenticated and node is None:  # nodes have their own token, or none
            common[TOKEN] = os.environ.get(TOKEN) or secrets.token_hex(32)
        ranks = range(node.rank * count if node else 0, (node.rank + 1) * count if node else count)
        environments = [{**os.environ, **common, **_rank_variables(rank, ranks, node)} for rank in ranks]
        processes = children.start_children(server, module, [str(folder), *arguments], environments)
        if started is not None:
            started[:] = [processes]
        codes = {ranks[place]: code for place, code in children.wait_for_children(processes, signals).items()}
    ended_with = {rank: code for rank, code in codes.items() if code}
    if ended_with and watch is not None and watch.were_done(ended_with):
        how = "; ".join(f"rank {rank}: {describe_death(code)}" for rank, code in ended_with.items())
        say(f"unisono: WARNING: while leaving, after all work was done, so nothing is lost: {how}", error=True)
    elif ended_with:
        raise select_fault(folder / "logs", codes, watch, node)
    if watch is not None and (unfinished := watch.unfinished_ranks()):
        raise LostWorkerError(watch.record_lost_rank(unfinished[0], 0).text, LostError.exit_code)


def process_variables(threads: int, reference: str) -> dict[str, str]:
    """Return environment variables for processes, beyond this process's own, unless the user has set them."""
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **memory_allocators.arena_variables(),
    }
    chosen = {name: value for name, value in defaults.items() if name not in os.environ}
    return {**chosen, "PYTHONPATH": _import_path(reference)}


@contextmanager
def open_fork_server(
    count: int, threads: int, reference: str, modules: Sequence[str] = (), engine: str = "torch"
) -> Iterator[ForkServer | None]:
    """Yield a fork server for the processes of a run, or None if they cannot be forks; it starts importing at once.

    Args:
        count: How many processes there will be here.
        threads: CPU threads per process.
        reference: Reference to the user's code.
        modules: To import in addition to what every rank needs.
        engine: Of the run; engines other than torch start threads, which do not survive a fork.
    """
    if count < 1 or engine != "torch" or not fork_server.can_fork():
        yield None
        return
    with ForkServer(modules, process_variables(threads, reference)) as server:
        yield server


def _signals_to_collect() -> tuple[int, ...]:
    """The signals that end all processes, but for one that a caller has a handler for, as a notebook has."""
    default = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, None)
    return tuple(number for number in INTERRUPT_SIGNALS if signal.getsignal(number) in default)


def remove_old_faults(folder: Path) -> None:
    """Remove the fault records of an earlier start from a run's folder."""
    logs = safe_writing.make_folder(folder, "logs")
    for pattern in ("*.fault.json", "monitor-node-*.json", "*.calls"):
        for old in logs.glob(pattern):
            old.unlink()


@contextmanager
def environment_changed(changes: Mapping[str, str]) -> Iterator[None]:
    """Temporarily change this process's environment, for the processes that it starts."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_variables(rank: int, ranks: range, node: Node | None) -> dict[str, str]:
    local, nodes, number = len(ranks), node.count if node else 1, node.rank if node else 0
    run_id = f"unisono-{os.getpid()}"
    numbers = {
        "RANK": rank, "WORLD_SIZE": local * nodes, "LOCAL_RANK": rank - ranks[0], "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": number, "GROUP_WORLD_SIZE": nodes, "ROLE_RANK": rank, "ROLE_WORLD_SIZE": local * nodes,
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
    }  # fmt: skip
    texts = {cluster.RUN_ID_VARIABLE: run_id, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**{name: str(value) for name, value in numbers.items()}, **texts}


def _address_variables(meet_at: tuple[str, int], loopback: bool, node: Node | None) -> dict[str, str]:
    variables = {"MASTER_ADDR": meet_at[0], "MASTER_PORT": str(meet_at[1])}
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if node is not None:
        variables[network.GLOO] = node.interface
        if network.NCCL not in os.environ:
            variables[network.NCCL] = f"={node.interface}"  # `=` means exactly this name, not a prefix
    elif interface and loopback and network.GLOO not in os.environ:
        variables[network.GLOO] = interface  # all processes are on this host, whatever its name resolves to
    return variables


def _import_path(reference: str) -> str:
    """Return `PYTHONPATH`, preceded by the folder in which this process finds the package of a `module:name`."""
    package = Path(reference.partition(":")[0].partition(".")[0])
    by_name = ":" in reference and ".py:" not in reference
    folders = [folder for folder in sys.path if by_name and folder and Path(folder, package).is_dir()]
    return os.pathsep.join(filter(None, [*folders, os.environ.get("PYTHONPATH")]))


def _preempted_error(folder: Path) -> Preempted:
    """Return the error of a run whose processes were ended before they could react."""
    try:
        newest = commit.find_newest_step(folder / placement.NAME)
    except UnavailableError as error:
        newest_text = str(error)
    else:
        newest_text = "there is no checkpoint yet" if newest is None else f"the newest checkpoint is from step {newest}"
    return Preempted(f"preempted before the processes could save; {newest_text}")
