"""One process of a job: joins the others, trains, reports errors, and exits in an order that gloo survives."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from unisono.checkpoint.core import provenance
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster
from unisono.launch.nodes import network
from unisono.launch.processes import fork_server
from unisono.launch.resolving import layout, resolve
from unisono.observe import logs
from unisono.runtime import heartbeat
from unisono.runtime.code.user_code import format_error
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.console import clean, say
from unisono.runtime.errors import (
    MemoryExhaustedError,
    NonFiniteError,
    Preempted,
    RecordError,
    RunError,
    SaveError,
    UnisonoError,
)
from unisono.runtime.files import write_whole
from unisono.supervise import fault_hook, preemption
from unisono.supervise.processes import die_with_process
from unisono.task_config import build_task

_RANK_0_HEAD_START = 3.0  # seconds for rank 0 to report a common error; it is seldom a tenth of that behind the others


def join_processes(config: RunConfig, place: ProcessInfo) -> Communicator:
    """Connect to the other processes, if there are any, and check that all were given the same inputs.

    Raises:
        DeadlineError: Naming ranks that did not appear.
        RunError: Naming two ranks and the entries in which they differ.
    """
    if config.layout.engine == "jax":
        return _join_jax(config, place)
    if config.layout.deterministic:
        from unisono.engines.torch.numerics import determinism

        determinism.prepare(config.layout)
    if config.layout.threads is not None:
        import torch

        torch.set_num_threads(config.layout.threads)
    if layout.is_single(config):
        return SingleProcess()
    from unisono.engines.torch import devices
    from unisono.engines.torch.parallel import process_group

    cluster.set_rendezvous_variables(place)
    device = devices.select_device(config.layout.device, place)
    group = process_group.start(place, device, config.launch.timeout, config.launch.start_timeout)
    provenance.check_agreement(group, provenance.shared_inputs(config))
    return group


def _join_jax(config: RunConfig, place: ProcessInfo) -> Communicator:
    """Connect to the other processes of a JAX run, if there are any, and start JAX with them."""
    from unisono.engines.jax.parallel import runtime
    from unisono.runtime.communication import tcp_communicator

    if place.world_size == 1:
        alone = SingleProcess()
        runtime.start(config, place, alone)
        return alone
    cluster.set_rendezvous_variables(place)
    host, port = cluster.meeting_point()
    group = tcp_communicator.connect_processes(place, host, port, config.launch.start_timeout, config.launch.timeout)
    provenance.check_agreement(group, provenance.shared_inputs(config))
    runtime.start(config, place, group, network.process_addresses(group, host, port))
    return group


def exit_cleanly(code: int) -> NoReturn:
    """End this process at once, after closing the process group and flushing all output.

    The interpreter's normal exit is not safe: a gloo thread that drops a tensor during shutdown aborts the process
    (pytorch/pytorch#179291), and a run that trained correctly would be reported as failed.
    """
    if code == 0:
        leave_group()
    exit_now(code)


def leave_group(group: Communicator | None = None) -> None:
    """Leave the process group, so that this process may join another."""
    gc.collect()  # objects reduced in the group must be gone
    if "torch.distributed" in sys.modules:
        from unisono.engines.torch.parallel import process_group

        process_group.stop()
    if group is not None and "jax" in sys.modules:
        from unisono.engines.jax.parallel import runtime

        runtime.stop(group)


@contextmanager
def log_errors(folder: Path, place: ProcessInfo) -> Iterator[None]:
    """Write errors into the rank's log, where they can be found even if nobody sees stderr."""
    try:
        yield
    except Exception as error:
        whole = str(error) if isinstance(error, UnisonoError) else "".join(traceback.format_exception(error))
        logs.log_fault(folder, place, clean(whole))
        raise


@contextmanager
def record_errors(folder: Path, place: ProcessInfo) -> Iterator[None]:
    """Log errors and leave a record for `unisono diagnose`, in a process that our launcher did not start."""
    try:
        with log_errors(folder, place):
            yield
    except Exception as error:
        _write_fault(folder / "logs" / f"rank-{place.rank:05d}.fault.json", place, error)
        raise


def run_and_exit(act: Any, place: ProcessInfo, report: Path | None = None) -> NoReturn:
    """Run all work of a process and exit with the right code.

    An error is written to `report` for the launcher. Without `report` it goes to stderr: from every rank, or only from
    rank 0 if the ranks have agreed on it.
    """

    def ends(error: BaseException) -> NoReturn:
        if report is not None:
            _write_fault(report, place, error)
        elif place.is_first or not (isinstance(error, UnisonoError) and _is_agreed(error)):
            label = "ended" if isinstance(error, Preempted) else "error"
            say(f"unisono: {label} on rank {place.rank}: {clean(format_error(error))}", error=True)
        else:
            # torchrun kills all others once one rank exits, perhaps before rank 0 has printed the reason.
            time.sleep(_RANK_0_HEAD_START)
        exit_now(_exit_code(error))

    try:
        with preemption.handle_signals(ends):
            act()
    except KeyboardInterrupt:
        exit_now(130)
    except BaseException as error:
        ends(error)
    exit_cleanly(0)


def _exit_code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, UnisonoError) else 1


def _write_fault(path: Path, place: ProcessInfo, error: BaseException) -> None:
    """Write an error where the launcher looks for it: the run's folder or, if its disk is full, shared memory."""
    fault = {
        "rank": place.rank,
        "kind": type(error).__name__,
        "text": clean(format_error(error)),
        "code": _exit_code(error),
        "foreign": not isinstance(error, UnisonoError),  # then it does not say by itself who failed
    }
    memory = isinstance(error, MemoryExhaustedError) or _is_out_of_memory(error)
    fault |= {"fault": getattr(error, "fault", ""), "memory": memory, "random": getattr(error, "random", None)}
    text = json.dumps({**fault, "time": time.time()})
    for folder in filter(None, (str(path.parent), os.environ.get(heartbeat.DIRECTORY_VARIABLE))):
        with contextlib.suppress(OSError):
            write_whole(Path(folder) / path.name, text)
            return


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from unisono.engines.torch.guards.oom import is_out_of_memory

    return is_out_of_memory(error)


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for others."""
    heartbeat.stop(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may be gone
            stream.flush()
    os._exit(code)


def _is_agreed(error: BaseException) -> bool:
    """Whether rank 0 reports the same error: it sent the error to this rank, or all ranks found it together."""
    collective_errors = RunError | NonFiniteError | SaveError | Preempted
    alone = isinstance(error, RecordError)
    return (isinstance(error, collective_errors) and not alone) or getattr(error, "agreed", False)


def die_with_parent() -> None:
    """End together with the parent process, so that a killed launcher leaves no orphans (on Linux)."""
    if not fork_server.is_fork:  # a fork already does
        die_with_process(cluster.launcher_pid())


def redirect_native_output(config: RunConfig, folder: Path, place: ProcessInfo) -> None:
    """Send what JAX's native code writes to a log of the rank's own, so that it stands in no output of the command."""
    if config.layout.engine == "jax":
        from unisono.engines.jax.parallel import runtime

        runtime.redirect_native_output(folder, f"logs/rank-{place.rank:05d}.native.log")


def main(folder: Path, digest: str) -> NoReturn:
    """Run a process that `unisono.launch.processes.local_processes` started."""
    die_with_parent()
    place = cluster.process_info()
    assert place is not None
    if directory := os.environ.get(heartbeat.DIRECTORY_VARIABLE):
        heartbeat.start(directory, place.rank)
    fault_hook.install(place.rank)

    def work() -> None:
        from unisono.training import loop
        from unisono.training.callbacks.build import build_callbacks

        with log_errors(folder, place):
            run = resolve.read_resolved_run(folder, digest)
            redirect_native_output(run.config, folder, place)
            communicator = join_processes(run.config, place)
            task = build_task(run.config)
            loop.train(task, run, place, communicator, build_callbacks(run.config, task))
            leave_group(communicator)

    run_and_exit(work, place, report=folder / "logs" / f"rank-{place.rank:05d}.fault.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
