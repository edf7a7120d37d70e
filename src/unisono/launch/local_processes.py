"""Several processes on this host, by torch's elastic launcher.

It is told of this host alone, even where there are several nodes: its own rendezvous across hosts waits without a
deadline once a link is dead. Which node this is goes to the processes in a variable (`unisono.launch.cluster`).
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from unisono.checkpoint.core import commit
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster, malloc_arenas
from unisono.launch.cluster import OURS
from unisono.launch.monitor_client import Watch, memory_folder, watching
from unisono.launch.nodes import network
from unisono.runtime import heartbeat
from unisono.runtime.communicator import STORE, Node, written
from unisono.runtime.errors import DesyncError, LostError, Preempted, StuckError, UnisonoError
from unisono.supervise import collective_mismatch, preemption
from unisono.supervise.hang_detection import death

TRAINS = "unisono.launch.rank_process"
_OF_TERMINALS = [getattr(signal, name) for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
_FOLLOWS = ("DeadlineError", "Preempted")  # what a rank tells that another one's end may be the reason of
_GRACE = 5  # seconds from the launcher's SIGTERM to its SIGKILL


class WorkerError(UnisonoError):
    """A fault of one process, told once for all of them.

    Attributes:
        memory: whether it ran out of memory, or was killed as one that does is.
        by_signal: whether it died by a signal and said nothing.
    """

    def __init__(self, text: str, code: int, fault: str = "", memory: bool = False, by_signal: bool = False) -> None:
        super().__init__(text, fault)
        self.exit_code = code
        self.memory = memory
        self.by_signal = by_signal


class LostWorkerError(WorkerError, LostError):
    """A process died without a word."""


class StuckWorkerError(WorkerError, StuckError):
    """A process did not go on."""


def launch(
    config: RunConfig,
    folder: Path,
    threads: int,
    module: str = TRAINS,
    node: Node | None = None,
) -> None:
    """Start the processes of a run, this node's share of `layout.world_size`, and wait for them.

    Args:
        config: concrete.
        folder: of the run; the processes read its `config.yaml`, and are told the task.
        threads: CPU threads per process, unless the user's environment says otherwise.
        module: what each process runs, with the folder as its argument.
        node: which one this is, where there are several.

    Raises:
        WorkerError: with the text and the exit code of the first fault.
        KeyboardInterrupt: after all processes have ended.
        Preempted: if this process was asked to end, and all processes have.
    """
    assert isinstance(config.layout.world_size, int)
    loopback = config.layout.device == "cpu"
    count = config.layout.world_size // (node.count if node else 1)
    first = node.rank * count if node else 0
    ranks = range(first, first + count)
    watch = watching(config, folder, ranks, node.rank if node else 0) if module == TRAINS else None
    deadline = config.launch.preempt_deadline
    with (
        preemption.passed_on(lambda: _running(module), lambda: _kill(module), deadline) as asked,
        watch or nullcontext(),
    ):
        try:
            processes(module, folder, count, threads, config.recipe, loopback, node, watch, "SIGINT,SIGHUP,SIGQUIT")
        except WorkerError as error:
            if asked() and error.by_signal:  # before they could hear it, or long after their deadline
                raise _preempted(folder) from None
            raise


def processes(
    module: str,
    folder: Path,
    count: int,
    threads: int,
    reference: str,
    loopback: bool,
    node: Node | None = None,
    watch: Watch | None = None,
    signals: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    ours: bool = True,
) -> None:
    """Start processes that each run a module, with a folder and `reference` as its arguments, and wait for them.

    Args:
        module: e.g. `unisono.launch.rank_process`.
        folder: what the processes read, and where they leave their logs.
        count: how many on this node.
        threads: CPU threads per process, unless the user's environment says otherwise.
        reference: to the user's code that they import, as `path/to/file.py:name` or `module:name`.
        loopback: whether gloo, if the processes use it, is to stay inside of this host; of one node only.
        node: which one this is, where there are several; whoever starts them has forgotten earlier faults.
        watch: the monitor to which the processes tell what they are at.
        signals: to this process, which end all of them.
        ours: whether rank 0 listens by `collective.start`, which shares the port that is kept for it; whoever else
            listens there would find it in use.

    Raises:
        WorkerError: with the text and the exit code of the first fault.
        KeyboardInterrupt: after all processes have ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from unisono.launch.nodes import static_rendezvous

    for name in list(logging.root.manager.loggerDict):  # its loggers have levels of their own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    run_id = f"unisono-{os.getpid()}"
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # A later attempt must not read the addresses of the earlier one (pytorch/pytorch#135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **malloc_arenas.variables(),
    }
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    if node is not None:
        defaults[network.NCCL] = f"={node.interface}"  # `=`: not whatever begins so
    elif interface and loopback:
        defaults[network.GLOO] = interface  # all processes are on this host, whatever its name resolves to
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    variables |= {OURS: run_id, "PYTHONPATH": _import_path(reference)}
    if node is None:
        forget(folder)
    else:
        variables |= {cluster.NODE: json.dumps(asdict(node)), network.GLOO: node.interface}
    if watch is not None:
        variables |= {heartbeat.VARIABLE: str(watch.directory)}
    private = watch.directory if watch is not None else memory_folder()
    if node is None and ours:
        variables |= {STORE: str(private / "store")}
    logs = folder / "logs"
    first = node.rank * count if node else 0
    address = network.loopback()
    try:
        with network.reserved(address) as held, variables_set(variables), _handlers_kept():
            settings = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                run_id=run_id,
                rdzv_backend=static_rendezvous.known(),
                rdzv_endpoint=written(address, held.getsockname()[1]),
                max_restarts=0,
                shutdown_timeout=_GRACE,
                signals_to_handle=signals,
            )
            if not ours:
                held.close()
            elastic_launch(settings, sys.executable)("-m", module, str(folder), reference)
    except SignalException as error:
        raise KeyboardInterrupt from error
    except ChildFailedError as error:
        raise _headline(logs, error, first, watch, node) from None
    finally:
        if watch is None:
            shutil.rmtree(private, ignore_errors=True)
    if watch is not None and (untold := watch.untold()):
        raise LostWorkerError(watch.lost(untold[0], 0).text, LostError.exit_code)


def forget(folder: Path) -> None:
    """Remove what the faults of an earlier start have left in a run's folder."""
    (folder / "logs").mkdir(exist_ok=True)
    for pattern in ("*.fault.json", "monitor-node-*.json", "*.calls"):
        for old in (folder / "logs").glob(pattern):
            old.unlink()


def _import_path(reference: str) -> str:
    """`PYTHONPATH`, and before it where this process finds the package of what is given as `module:name`."""
    package = Path(reference.partition(":")[0].partition(".")[0])
    by_name = ":" in reference and ".py:" not in reference
    found = [folder for folder in sys.path if by_name and folder and Path(folder, package).is_dir()]
    return os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH")]))


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Have this process's signal handlers afterwards as they were: torch's launcher leaves its own behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, *_OF_TERMINALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it was not set from Python
                signal.signal(number, handler)


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """This process's environment changed for the processes that it starts, and then as it was."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _headline(
    logs: Path, error: Any, first: int = 0, watch: Watch | None = None, node: Node | None = None
) -> WorkerError:
    """The fault to show: a process that died or was stuck, or the first fault that is not a wait in vain for another.

    Args:
        logs: of the run, with the faults and what the monitors found of all nodes.
        error: torch's, whose ranks are those of this node.
        first: rank of this node's first process.
        watch: the monitor of this node.
        node: which one this is, where there are several.
    """
    ended = time.time()
    folders = [logs] if watch is None else [logs, watch.directory]
    faults = [json.loads(path.read_text(encoding="utf-8")) for each in folders for path in each.glob("*.fault.json")]
    faults.sort(key=lambda fault: (fault["kind"] in _FOLLOWS, fault["time"]))
    found = _found(logs, watch)
    told = {fault["rank"] for fault in faults}
    ended_with = {first + rank: failure.exitcode for rank, failure in error.failures.items()}
    silent = {rank: code for rank, code in ended_with.items() if rank not in told}
    # The launcher ends what is left after a fault, which is no death of its own: at once, or after its grace.
    late = bool(faults) and ended - min(fault["time"] for fault in faults) >= _GRACE
    ended_others = {-signal.SIGTERM, preemption.ENDED + signal.SIGTERM}
    by_launcher = {*ended_others, *([-signal.SIGKILL] if late else [])} if faults else set()
    deaths = [(rank, code) for rank, code in silent.items() if code not in by_launcher]
    # Torch's launcher takes exit code 0 for success, however early it comes.
    early = watch.untold() if watch is not None else []
    deaths += [(rank, 0) for rank in early if rank not in ended_with and rank not in told]
    # Where a rank has died, one that has made no step yet takes the launcher's SIGTERM for a preemption.
    if not faults or faults[0]["kind"] == "DeadlineError" or (faults[0]["kind"] == "Preempted" and deaths):
        if watch is not None and (differ := _explained(logs, watch, node)):
            return WorkerError(differ, DesyncError.exit_code, DesyncError.fault)
        if found is not None and found["kind"] == StuckError.__name__:
            return StuckWorkerError(found["text"], StuckError.exit_code)
        # Processes that the monitor ended because another one was gone did not die by themselves.
        lost = found["rank"] if found is not None else _earliest(deaths, ended_others)
        if lost is not None and watch is not None and lost in range(first, first + watch.count):
            code = ended_with.get(lost, 0)
            text = watch.lost(lost, code).text
            return LostWorkerError(text, LostError.exit_code, memory=code == -9, by_signal=code < 0)
        if found is not None:
            return LostWorkerError(found["text"], LostError.exit_code)
        if lost is not None:
            code = dict(deaths)[lost]
            text = f"rank {lost} died without a message ({death(code)}); see {logs}"
            return LostWorkerError(text, LostError.exit_code, memory=code == -9, by_signal=code < 0)
    if not faults:
        return WorkerError(f"{error}; see {logs}", 1)
    fault = faults[0]
    if fault["text"].startswith("Traceback"):
        others = f" ({len(faults) - 1} other processes report a fault too; see {logs})" if len(faults) > 1 else ""
        memory = bool(fault.get("memory"))
        return WorkerError(f"rank {fault['rank']} failed{others}\n{fault['text']}", fault["code"], memory=memory)
    ranks = ", ".join(map(str, sorted(silent)))
    stuck = f"\nRanks that said nothing until the launcher ended them: {ranks}"
    text = fault["text"] + (stuck if ranks and fault["kind"] == "DeadlineError" else "")
    return WorkerError(text, fault["code"], fault["fault"], memory=bool(fault.get("memory")))


def _explained(logs: Path, watch: Watch, node: Node | None) -> str | None:
    """Whether ranks made different collectives, of this node or of two."""
    if node is None:
        return collective_mismatch.explain(watch.directory)
    return collective_mismatch.explain_across(watch.directory, logs, watch.count * node.count)


def _found(logs: Path, watch: Watch | None) -> dict[str, Any] | None:
    """What the monitor of this node has found, else that of another one."""
    found = watch.finding() if watch is not None else None
    for path in sorted(logs.glob("monitor-node-*.json")):
        with suppress(OSError, ValueError):
            found = found or json.loads(path.read_text(encoding="utf-8"))
    return found


def _earliest(deaths: list[tuple[int, int]], by_launcher: set[int]) -> int | None:
    """Of processes that died, the one to name: not one that the launcher has ended after another had died."""
    return min(deaths, key=lambda death: death[1] in by_launcher)[0] if deaths else None


def _running(module: str) -> list[int]:
    """The numbers of the processes that this one has started to run a module."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child.pid)
    return found


def _kill(module: str) -> None:
    for number in _running(module):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _preempted(folder: Path) -> Preempted:
    """The error of a run whose processes were ended before they could answer."""
    newest = [int(path.name.rpartition("-")[2]) for path in commit.find(folder / "checkpoints")[-1:]]
    kept = f"the newest checkpoint is that of step {newest[0]}" if newest else "there is no checkpoint yet"
    return Preempted(f"preempted before the processes could save; {kept}. Start the same command again to go on")
