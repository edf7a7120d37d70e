"""Kills at random instants: the run goes on after each, and ends as the one that was never killed."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

from unisono.faults import job
from unisono.faults.death import DIED, kill
from unisono.faults.matrix import Ground, Outcome, fault

KILLS = "UNISONO_KILLS"  # how many instants the random kills take
SEED = 20_261_122
# A network of some megabytes: a save takes about as long as the steps between two of them.
BIG = ("task.width=60000", "task.sleep=0.02", "train.steps=200", "checkpoint.every=2", "checkpoint.keep=2")
_CHAIN = 10  # kills of one run before it may end


def instants() -> int:
    """How many random instants are asked for."""
    return int(os.environ.get(KILLS, "200"))


@fault("A4", "kill -9 of everything at random instants, of all phases", quick=True)
def _anywhere(ground: Ground) -> Outcome:
    return _chains(ground, instants(), everyone=True)


@fault("A4b", "kill -9 of one rank at random instants, of all phases")
def _one_anywhere(ground: Ground) -> Outcome:
    return _chains(ground, instants() // 4, everyone=False)


def _chains(ground: Ground, count: int, *, everyone: bool) -> Outcome:
    """Runs that are killed again and again, ten times each; every commit after a kill can be loaded."""
    rng = random.Random(SEED)
    outcome, slowest, lost, made = Outcome(exact=True), 0.0, 0, 0
    before = ground.unharmed(*BIG)
    for chain in range(-(-count // _CHAIN)):
        own = ground.for_(f"chain{chain}")
        for number in range(min(_CHAIN, count - chain * _CHAIN)):
            with own.job(*BIG) as run:
                known = job.last_step(run.run)
                run.reaches(known + 2)
                time.sleep(rng.uniform(0.0, 0.5))
                if run.process.poll() is not None:
                    break
                began = _kill(run, rng, everyone)
                done = run.finish()
                slowest, made = max(slowest, done.ended - began), made + 1
                outcome.promise(not done.orphans, f"kill {number} of chain {chain}: {done.orphans} are left")
                outcome.promise(
                    everyone or done.code == DIED, f"kill {number}: exit code {done.code}: {done.said[-800:]}"
                )
                kept, last = job.newest(run.run), run.step()
                outcome.promise(last < 2 or kept > 0, f"kill {number} of chain {chain}: no commit can be loaded")
                lost = max(lost, last - max(kept, 0))
        own.go_on(outcome, before, *BIG)
    outcome.said = f"{made} kills"
    outcome.seconds, outcome.lost = round(slowest, 1), lost
    outcome.promise(made >= min(count, 5), f"only {made} kills of {count}")
    return outcome


def _kill(run: job.Job, rng: random.Random, everyone: bool) -> float:
    if not everyone:
        return kill(rng.choice(run.workers(2)))
    began = time.monotonic()
    for pid in [run.process.pid, *run.processes()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return began


def _mid_save(key: str, text: str, where: str, numbers: tuple[int, ...]) -> None:
    """Rows of the matrix: rank 0 is killed in the n-th such call of the operating system."""

    @fault(key, text)
    def _act(ground: Ground) -> Outcome:
        total = Outcome(exact=True, lost=0)
        for number in numbers:
            found = ground.for_(f"{key}-{number}").harmed(
                f"kill@{where}:0:{number}", code=DIED, says=("rank 0", "signal 9")
            )
            total.wrong += [f"call {number}: {wrong}" for wrong in found.wrong]
            total.seconds = max(total.seconds or 0.0, found.seconds or 0.0)
            total.lost = max(total.lost or 0, found.lost or 0)
            total.exact = bool(total.exact and found.exact)
            total.said = found.said
        return total


_mid_save("A4c", "kill -9 of rank 0 before what it wrote is flushed to the disk", "fsync", (2, 5, 8, 12))
_mid_save("A4d", "kill -9 of rank 0 just after a flush to the disk", "fsynced", (2, 5, 8, 12))
_mid_save("A4e", "kill -9 of rank 0 before a commit's rename", "rename", (1, 3, 5))
_mid_save("A4f", "kill -9 of rank 0 after a commit's rename", "renamed", (1, 3, 5))
_mid_save("A4g", "kill -9 of rank 0 while it deletes an old commit", "rmtree", (0,))
