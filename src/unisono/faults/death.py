"""Processes that die, freeze or misbehave."""

from __future__ import annotations

import os
import signal
import time

from unisono.faults.job import Job
from unisono.faults.matrix import Ground, Outcome, fault

DIED, STUCK = 9, 10


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """Send a signal; returns when."""
    now = time.monotonic()
    os.kill(pid, number)
    return now


def in_full_run(run: Job, count: int = 2) -> list[int]:
    """The ranks of a job that is making steps."""
    found = run.workers(count)
    run.reaches(4)
    return found


@fault("A1", "kill -9 of a rank in the forward pass", quick=True)
def _forward(ground: Ground) -> Outcome:
    return ground.harmed("kill@forward:1:7", code=DIED, says=("rank 1", "signal 9"))


@fault("A2", "kill -9 of a rank in the backward pass, the others in the all-reduce")
def _backward(ground: Ground) -> Outcome:
    return ground.harmed("kill@backward:1:7", code=DIED, says=("rank 1", "signal 9"))


@fault("A3", "kill -9 of a rank in the optimizer's step")
def _update(ground: Ground) -> Outcome:
    return ground.harmed("kill@update:1:7", code=DIED, says=("rank 1", "signal 9"))


@fault("A5", "kill -9 of rank 0 only")
def _first(ground: Ground) -> Outcome:
    return ground.harmed("kill@forward:0:7", code=DIED, says=("rank 0", "signal 9"))


@fault("A6", "kill -9 of the launcher only")
def _launcher(ground: Ground) -> Outcome:
    before = ground.unharmed("task.sleep=0.05")
    with ground.job("task.sleep=0.05") as run:
        in_full_run(run)
        began = kill(run.process.pid)
        done = run.finish()
        outcome = Outcome(seconds=round(done.ended - began, 1), said="(nobody is left to say it)")
        outcome.promise(not done.orphans, f"processes {done.orphans} are left")
    ground.go_on(outcome, before, "task.sleep=0.05")
    return outcome


@fault("A7", "kill -9 of a process that makes samples")
def _loader(ground: Ground) -> Outcome:
    words = ("data.workers=1", "data.worker_kind=processes")
    return ground.harmed("kill@data:-1:20", *words, code=2, says=("worker",))


@fault("A9", "SIGSTOP of a rank: frozen, not dead", quick=True)
def _frozen(ground: Ground) -> Outcome:
    return ground.harmed("stop@forward:1:7", code=STUCK, says=("rank 1", "harmed.py:"), within=30.0)


@fault("B10", "a rank sleeps for ever in user code")
def _sleeps(ground: Ground) -> Outcome:
    return ground.harmed("sleep@forward:1:7", code=STUCK, says=("rank 1", "harmed.py:"), within=30.0)


@fault("B10b", "a rank holds the interpreter's lock for ever")
def _holds_the_lock(ground: Ground) -> Outcome:
    return ground.harmed("gil@forward:1:7", code=STUCK, says=("rank 1", "harmed.py:"), within=30.0)


@fault("B11", "a rank is slow from some step on: named, not killed")
def _slow(ground: Ground) -> Outcome:
    words = ("train.steps=80",)  # it has to be slow for two windows of twenty
    before = ground.unharmed(*words)
    with ground.job(*words, misbehave="slow@forward:1:7") as run:
        done = run.finish()
        outcome = Outcome(said=next((line for line in done.said.splitlines() if "holds up" in line), ""))
        outcome.promise(done.code == 0, f"it ended with {done.code}: {done.said[-1500:]}")
        outcome.promise("rank 1" in outcome.said and "compute" in outcome.said, f"not named: {done.said[-1500:]}")
        from unisono.faults import job

        outcome.exact = job.state(run.run) == before
        outcome.promise(outcome.exact, "it ended otherwise")
    return outcome


@fault("B12", "a rank raises")
def _raises(ground: Ground) -> Outcome:
    return ground.harmed("raise@forward:1:7", code=1, says=("rank 1", "the sky fell", "harmed.py"))


@fault("B13", "a rank ends with exit code 0, too early")
def _leaves(ground: Ground) -> Outcome:
    return ground.harmed("exit@forward:1:7", code=DIED, says=("rank 1", "exit code 0"))
