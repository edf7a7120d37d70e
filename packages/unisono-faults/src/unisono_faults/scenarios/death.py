"""Processes that die, freeze or fault."""

from __future__ import annotations

import os
import signal
import time

from unisono_faults.matrix import DIED, REFUSED, STUCK, Outcome, Sandbox, scenario

HELD = "hold@forward:1:7"  # the run stays in step 8 until it is released


def send_signal(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; return the time."""
    now = time.monotonic()
    os.kill(pid, number)
    return now


def _add_fault(
    key: str, text: str, fault: str, *words: str, code: int = DIED, says: tuple[str, ...], quick: bool = False
) -> None:
    """Add a row of the matrix: a fault inside the task that ends a run."""

    @scenario(key, text, quick=quick)
    def _act(sandbox: Sandbox) -> Outcome:
        return sandbox.run_with_fault(fault, *words, code=code, says=says, within=30.0 if code == STUCK else 10.0)


_KILLED, _IN_THE_TASK = ("rank 1", "signal 9"), ("rank 1", "faulty.py:")
_IN_PROCESSES = ("data.workers=1", "data.worker_kind=processes")
_add_fault("A1", "kill -9 of a rank in the forward pass", "kill@forward:1:7", says=_KILLED, quick=True)
_add_fault(
    "A2", "kill -9 of a rank in the backward pass, the others in the all-reduce", "kill@backward:1:7", says=_KILLED
)
_add_fault("A3", "kill -9 of a rank in the optimizer step", "kill@update:1:7", says=_KILLED)
_add_fault("A5", "kill -9 of rank 0 only", "kill@forward:0:7", says=("rank 0", "signal 9"))
_add_fault("A7", "kill -9 of a data worker process", "kill@data:-1:20", *_IN_PROCESSES, code=REFUSED, says=("worker",))
_add_fault("A9", "SIGSTOP of a rank: frozen, not dead", "stop@forward:1:7", code=STUCK, says=_IN_THE_TASK)
_add_fault("B10", "a rank sleeps forever in user code", "sleep@forward:1:7", code=STUCK, says=_IN_THE_TASK)
_add_fault("B10b", "a rank holds the GIL forever", "gil@forward:1:7", code=STUCK, says=_IN_THE_TASK)
_add_fault(
    "B12", "a rank raises an exception", "raise@forward:1:7", code=1, says=("rank 1", "the sky fell", "faulty.py")
)
_add_fault("B13", "a rank exits early with code 0", "exit@forward:1:7", says=("rank 1", "exit code 0"))


@scenario("A6", "kill -9 of the launcher only")
def _launcher(sandbox: Sandbox) -> Outcome:
    before = sandbox.reference_digests()
    with sandbox.job(fault=HELD) as run:
        run.wait_for_hold()
        began = send_signal(run.process.pid)
        done = run.finish()
        outcome = Outcome(seconds=round(done.ended_at - began, 1), message="(no process is left to report it)")
        outcome.check(not done.orphans, f"processes {done.orphans} are still running")
    sandbox.check_resume(outcome, before)
    return outcome


@scenario("B11", "a rank becomes slow: reported, not killed")
def _slow(sandbox: Sandbox) -> Outcome:
    words = ("train.steps=80",)  # it must be slow for two windows of twenty steps
    before = sandbox.reference_digests(*words)
    done = sandbox.run(*words, fault="slow@forward:1:7")
    outcome = Outcome(message=done.line_with("holds up"))
    outcome.check("rank 1" in outcome.message and "compute" in outcome.message, f"not named: {done.output[-1500:]}")
    outcome.compare(done, before)
    return outcome
