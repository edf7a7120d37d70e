"""Restarts the processes of a run from the newest checkpoint after one of them died or was stuck.

Every attempt is resolved anew, with its own address, store and monitor, so it cannot be confused with the previous one.
After an out-of-memory error, the next attempt uses the next smaller micro-batch. A run that ended by a refusal, a guard
or a non-finite number would end the same way again, and is not restarted.
"""

from __future__ import annotations

from contextlib import suppress

from unisono.config.resolved_run import ResolvedRun
from unisono.launch import exit_advice
from unisono.launch.processes import local_processes
from unisono.launch.processes.fork_server import ForkServer
from unisono.launch.processes.local_processes import WorkerError
from unisono.launch.resolving import resolve
from unisono.observe import events
from unisono.runtime.console import say
from unisono.runtime.errors import DeadlineError, LostError, MemoryExhaustedError, StuckError, UnisonoError
from unisono.supervise import fault_hook, preemption

RESTARTABLE = (DeadlineError.exit_code, LostError.exit_code, StuckError.exit_code, MemoryExhaustedError.exit_code)


def launch_with_restarts(run: ResolvedRun, threads: int, server: ForkServer | None = None) -> None:
    """Launch a locked run on this host, restarting it up to `launch.max_restarts` times; see `local_processes.launch`.

    Raises:
        WorkerError: The fault of the last attempt.
    """
    allowed = run.config.launch.max_restarts
    for attempt in range(allowed + 1):
        try:
            with local_processes.environment_changed({fault_hook.ATTEMPT: str(attempt)}):
                local_processes.launch(run.config, run.directory, threads, arguments=(run.digest,), server=server)
            return
        except WorkerError as error:
            is_ending = preemption.seconds_since_signal() is not None  # and nobody waits for another attempt
            if error.exit_code not in RESTARTABLE or attempt == allowed or is_ending:
                raise _final_error(run, error, attempt) from None
            try:
                short = error.exit_code == MemoryExhaustedError.exit_code
                run = resolve.with_smaller_micro_batch(run, error.random) if short else resolve.plan_restart(run)
            except UnisonoError:
                raise _final_error(run, error, attempt) from None
            _report_restart(run, attempt + 1, allowed, error)


def _final_error(run: ResolvedRun, error: WorkerError, attempt: int) -> WorkerError:
    """Add how often the run was restarted to the last error, and what to do if memory was short."""
    lines = [str(error)]
    if attempt:
        lines.append(f"It was restarted {'once' if attempt == 1 else f'{attempt} times'} (launch.max_restarts)")
    if error.exit_code == MemoryExhaustedError.exit_code:
        lines.append(exit_advice.out_of_memory_advice(run, error.random))
        if not run.config.launch.max_restarts:
            lines.append("launch.max_restarts=1 does this automatically where it changes no result")
    error.args = ("\n".join(lines),)
    return error


def _report_restart(run: ResolvedRun, attempt: int, allowed: int, error: WorkerError) -> None:
    """Report a restart and its reason on the console and in `events.jsonl`."""
    step = run.resume.step if run.resume else 0
    where = f"from the checkpoint of step {step}" if run.resume else "from the beginning: there is no checkpoint"
    rows = run.layout.micro_batch
    smaller = f", with layout.micro_batch={rows}" if error.exit_code == MemoryExhaustedError.exit_code else ""
    how_often = f"(attempt {attempt} of {allowed}, launch.max_restarts)"
    say(f"unisono: {error}\nunisono: restarting all processes {where}{smaller} {how_often}", error=True)
    event = {"step": step, "restart": attempt, "code": error.exit_code, "why": str(error).splitlines()[0]}
    with suppress(OSError):  # already reported above
        events.append_event(run.directory / "events.jsonl", event)
