"""One process of a job: join the others, train, report what went wrong, and leave in an order that gloo survives."""

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
from unisono.config import secrets
from unisono.config.schema.run import RunConfig
from unisono.launch import cluster, layout, resolve
from unisono.launch.processes import fork_server
from unisono.observe import logs
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Alone, Group, Place
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
from unisono.supervise import fault_injection, preemption
from unisono.task_config import build_task

_HEADSTART = 3.0  # seconds for rank 0 to tell what all ranks know; it is seldom later than the others by a tenth of it


def join(config: RunConfig, place: Place) -> Group:
    """Meet the other processes, if there can be any, and agree with them on what they were given.

    Raises:
        DeadlineError: naming ranks that did not appear.
        RunError: naming two ranks and the entries in which they differ.
    """
    if config.layout.engine == "jax":
        return _join_jax(config, place)
    if config.layout.threads is not None:
        import torch

        torch.set_num_threads(config.layout.threads)
    if layout.is_single(config):
        return Alone()
    from unisono.engines.torch import devices
    from unisono.engines.torch.parallel import process_group

    cluster.complete(place)
    device = devices.device_of(config.layout.device, place)
    group = process_group.start(place, device, config.launch.timeout, config.launch.start_timeout)
    provenance.agree(group, provenance.given(config))
    return group


def _join_jax(config: RunConfig, place: Place) -> Group:
    """Meet the other processes of a JAX run, if there are any, and start JAX with them."""
    from unisono.engines.jax.parallel import runtime
    from unisono.runtime import tcp_communicator

    if place.world_size == 1:
        alone = Alone()
        runtime.start(config, place, alone, "")
        return alone
    cluster.complete(place)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    group = tcp_communicator.meet(place, host, port, config.launch.start_timeout, config.launch.timeout)
    provenance.agree(group, provenance.given(config))
    runtime.start(config, place, group, host)
    return group


def leave(code: int) -> NoReturn:
    """End this process at once, after the process group is closed and everything is written.

    The interpreter's own way out is not safe: a gloo thread that drops a tensor while the interpreter goes down aborts
    the process (pytorch/pytorch#179291), and a run that trained correctly would be reported as failed.
    """
    if code == 0:
        part()
    leave_now(code)


def part(group: Group | None = None) -> None:
    """Leave the process group, so that this process may join another."""
    gc.collect()  # what was reduced in it must be gone
    if "torch.distributed" in sys.modules:
        from unisono.engines.torch.parallel import process_group

        process_group.stop()
    if group is not None and "jax" in sys.modules:
        from unisono.engines.jax.parallel import runtime

        runtime.stop(group)


@contextmanager
def logged(folder: Path, place: Place) -> Iterator[None]:
    """Write whatever goes wrong into the rank's log, which is there even where nobody sees its stderr."""
    try:
        yield
    except Exception as error:
        logs.fault(folder, place, _text(error))
        raise


@contextmanager
def recorded(folder: Path, place: Place) -> Iterator[None]:
    """`logged`, and whatever goes wrong left for `unisono diagnose`, of a process that our launcher did not start."""
    try:
        with logged(folder, place):
            yield
    except Exception as error:
        _record(folder / "logs" / f"rank-{place.rank:05d}.fault.json", place, error)
        raise


def guarded(act: Any, place: Place, report: Path | None = None) -> NoReturn:
    """Run a whole process's work and end the process with the right code.

    A fault is written to `report` where a launcher reads it; without one, it goes to stderr: from every rank, unless
    the ranks have agreed on it.
    """

    def ends(error: BaseException) -> NoReturn:
        if report is not None:
            _record(report, place, error)
        elif place.is_first or not (isinstance(error, UnisonoError) and _agreed(error)):
            print(f"unisono: {_kind(error)} on rank {place.rank}: {_text(error)}", file=sys.stderr)
        else:
            time.sleep(_HEADSTART)  # torchrun ends all others with the first that leaves, before rank 0 has told why
        leave_now(_code(error))

    try:
        with preemption.heeded(ends):
            act()
    except KeyboardInterrupt:
        leave_now(130)
    except BaseException as error:
        ends(error)
    leave(0)


def _text(error: BaseException) -> str:
    told = str(error) if isinstance(error, UnisonoError) else "".join(traceback.format_exception(error))
    return secrets.mask(told)


def _code(error: BaseException) -> int:
    return error.exit_code if isinstance(error, UnisonoError) else 1


def _record(path: Path, place: Place, error: BaseException) -> None:
    """Leave a fault where the launcher looks for it: in the run's folder or, if its disk is full, in shared memory."""
    told = {"rank": place.rank, "kind": type(error).__name__, "text": _text(error), "code": _code(error)}
    memory = isinstance(error, MemoryExhaustedError) or _ran_out(error)
    told |= {"fault": getattr(error, "fault", ""), "memory": memory, "random": getattr(error, "random", None)}
    text = json.dumps({**told, "time": time.time()})
    for folder in filter(None, (str(path.parent), os.environ.get(heartbeat.VARIABLE))):
        with contextlib.suppress(OSError):
            write_whole(Path(folder) / path.name, text)
            return


def _ran_out(error: BaseException) -> bool:
    """Whether it is torch's own error for a device, or a host, without memory."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from unisono.engines.torch.guards.oom import is_out_of_memory

    return is_out_of_memory(error)


def leave_now(code: int) -> NoReturn:
    """End this process without waiting for anybody."""
    heartbeat.stop(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _agreed(error: BaseException) -> bool:
    """Whether rank 0 says the same: it told this rank so, or the ranks found out together."""
    told_to_all = RunError | NonFiniteError | SaveError | Preempted
    alone = isinstance(error, RecordError)
    return (isinstance(error, told_to_all) and not alone) or getattr(error, "agreed", False)


def _kind(error: BaseException) -> str:
    return "ended" if isinstance(error, Preempted) else "error"


def die_with_parent() -> None:
    """End with whoever started this process, so that a killed launcher leaves no orphan (on Linux)."""
    if not fork_server.is_fork:  # whose server has seen to that
        fork_server.die_with(cluster.launcher())


def main(folder: Path, digest: str) -> NoReturn:
    """Entry of a process that `unisono.launch.processes.local_processes` started."""
    die_with_parent()
    place = cluster.process_info()
    assert place is not None
    if directory := os.environ.get(heartbeat.VARIABLE):
        heartbeat.start(directory, place.rank)
    fault_injection.install(place.rank)

    def work() -> None:
        from unisono.training import loop
        from unisono.training.callbacks.build import build_callbacks

        with logged(folder, place):
            run = resolve.read(folder, digest)
            if run.layout.engine == "jax":
                from unisono.engines.jax.parallel import runtime

                runtime.redirect_native_output(folder / "logs" / f"rank-{place.rank:05d}.native.log")
            communicator = join(run.config, place)
            task = build_task(run.config)
            loop.train(task, run, place, communicator, build_callbacks(run.config, task))
            part(communicator)

    guarded(work, place, report=folder / "logs" / f"rank-{place.rank:05d}.fault.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
