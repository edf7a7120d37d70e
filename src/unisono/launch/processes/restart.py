"""Start the processes of a run again after one of them died or was stuck, from the newest checkpoint.

Every attempt is a run of its own, resolved anew, with an address, a store and a monitor of its own: nothing of the one
before can be mistaken for it. One that ran out of memory gets the next smaller micro-batch. What a refusal, a guard or
a number that is not finite has ended would end again, and stays as it is.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from unisono.config.resolved_run import ResolvedRun
from unisono.launch import ending, resolve
from unisono.launch.processes import local_processes
from unisono.launch.processes.fork_server import ForkServer
from unisono.launch.processes.local_processes import WorkerError
from unisono.observe import events
from unisono.runtime.errors import DeadlineError, LostError, MemoryExhaustedError, StuckError, UnisonoError
from unisono.supervise import fault_injection, preemption

AGAIN = (DeadlineError.exit_code, LostError.exit_code, StuckError.exit_code, MemoryExhaustedError.exit_code)


def launch(run: ResolvedRun, threads: int, server: ForkServer | None = None) -> None:
    """Launch a run on this host, as often as `launch.max_restarts` allows; see `local_processes.launch`.

    Args:
        run: its directory is held.
        threads: CPU threads per process.
        server: forks the processes; None: they are new ones.

    Raises:
        WorkerError: the fault of the last attempt, or one after which there is no other.
    """
    allowed = run.config.launch.max_restarts
    for attempt in range(allowed + 1):
        try:
            with local_processes.variables_set({fault_injection.ATTEMPT: str(attempt)}):
                local_processes.launch(run.config, run.directory, threads, arguments=(run.digest,), server=server)
            return
        except WorkerError as error:
            asked = preemption.waited() is not None  # to end: whoever did would not wait for another attempt
            if error.exit_code not in AGAIN or attempt == allowed or asked:
                raise _last(run, error, attempt) from None
            try:
                run = _next(run, error)
            except UnisonoError:
                raise _last(run, error, attempt) from None
            _report(run, attempt + 1, allowed, error)


def _next(run: ResolvedRun, error: WorkerError) -> ResolvedRun:
    """The run of the next attempt; an error where there can be none."""
    if error.exit_code == MemoryExhaustedError.exit_code:
        return resolve.smaller(run, error.random)
    return resolve.again(run)


def _last(run: ResolvedRun, error: WorkerError, attempt: int) -> WorkerError:
    """The error of the last attempt, with how often the run was restarted, and what to do where memory was short."""
    lines = [str(error)]
    if attempt:
        lines.append(f"It was restarted {'once' if attempt == 1 else f'{attempt} times'} (launch.max_restarts)")
    if error.exit_code == MemoryExhaustedError.exit_code:
        lines.append(ending.memory_advice(run, error.random))
        if not run.config.launch.max_restarts:
            lines.append("launch.max_restarts=1 makes it smaller by itself, where that changes no result")
    error.args = ("\n".join(lines),)
    return error


def _report(run: ResolvedRun, attempt: int, allowed: int, error: WorkerError) -> None:
    """Say that the processes are started again, and why, here and in `events.jsonl`."""
    step = run.resume.step if run.resume else 0
    where = f"from the checkpoint of step {step}" if run.resume else "from the beginning: there is no checkpoint"
    rows = run.layout.micro_batch
    smaller = f", with layout.micro_batch={rows}" if error.exit_code == MemoryExhaustedError.exit_code else ""
    print(  # noqa: T201
        f"unisono: {error}\nunisono: restarting all processes {where}{smaller} (attempt {attempt} of {allowed}, "
        "launch.max_restarts)",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    with suppress(OSError):  # it is reported above
        events.append(
            run.directory / "events.jsonl",
            {"step": step, "restart": attempt, "code": error.exit_code, "why": str(error).splitlines()[0]},
        )
