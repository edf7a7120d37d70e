"""Kills at random instants: the run goes on after each, and ends as the one that was never killed.

A run is killed ten times before it may end: while its processes start, meet and load, in steps and between them, while
a save is on its way, and after the last step. Two such runs go on at once. Where all processes are killed together,
the ranks are forks of a process with warm imports (`unisono.faults.fork_server`), but for the kills while they start.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from unisono.faults import job
from unisono.faults.fork_server import Stem
from unisono.faults.matrix import Ground, Outcome, fault
from unisono.faults.scenarios.death import DIED

KILLS = "UNISONO_KILLS"  # how many instants the random kills take
SEED = 20_261_122
TOTAL, EVERY = 100, 2
# A network of some megabytes: a save takes about as long as the steps between two of them.
BIG = ("task.width=60000", "task.sleep=0.02", f"train.steps={TOTAL}", f"checkpoint.every={EVERY}", "checkpoint.keep=2")
_TOLD = {
    "start": "between the command and its first step",
    "join": "while ranks met, loaded and warmed up",
    "steps": "in steps and between them",
    "save": "once a save had begun",
    "end": "about the last step",
}
# When the ten kills of a run are.
_OF_ALL = ("start", "join", "save", "steps", "save", "start", "steps", "join", "save", "end")
_OF_ONE = ("join", "steps", "save", "join", "steps", "save", "join", "steps", "save", "steps")


def instants() -> int:
    """How many random instants are asked for."""
    return int(os.environ.get(KILLS, "200"))


@fault("A4", "kill -9 of everything at random instants, of all phases", quick=True)
def _anywhere(ground: Ground) -> Outcome:
    with Stem() as stem:
        return _chains(ground, instants(), _OF_ALL, stem)


@fault("A4b", "kill -9 of one rank at random instants, of all phases")
def _one_anywhere(ground: Ground) -> Outcome:
    return _chains(ground, instants() // 4, _OF_ONE)


@dataclass
class _Kill:
    """One kill.

    Attributes:
        when: a key of `_TOLD`.
        seconds: until the last process was gone.
        cut: whether it left half a checkpoint behind.
        kept: step of the newest commit that can be loaded; -1 if there is none.
        lost: steps that have to be made again.
        wrong: promises that were not kept.
    """

    when: str
    seconds: float = 0.0
    cut: bool = False
    kept: int = -1
    lost: int = 0
    wrong: list[str] = field(default_factory=list)


def _chains(ground: Ground, count: int, phases: tuple[str, ...], stem: Stem | None = None) -> Outcome:
    """So many kills, of all processes where there is a stem, else of one rank."""
    before = ground.unharmed(*BIG)
    times = {when: _until_first_step(ground, when, stem) for when in ("start", "join")}
    outcome = Outcome(exact=True)

    def chain(number: int) -> list[_Kill]:
        rng, own, kills = random.Random(f"{SEED} {number}"), ground.for_(f"chain{number}"), [_Kill("")]
        for turn, when in enumerate(phases[: count - number * len(phases)]):
            kills.append(_killed(own, rng, when, times, stem, kills[-1].kept))
            kills[-1].wrong = [f"kill {turn} of chain {number} ({when}): {wrong}" for wrong in kills[-1].wrong]
        own.go_on(outcome, before, *BIG)
        return kills[1:]

    with ThreadPoolExecutor(2) as pool:
        kills = [one for found in pool.map(chain, range(-(-count // len(phases)))) for one in found]
    outcome.wrong += [wrong for one in kills for wrong in one.wrong]
    outcome.seconds, outcome.lost = round(max(one.seconds for one in kills), 1), max(one.lost for one in kills)
    outcome.said = _sentence(kills)
    return outcome


def _killed(
    own: Ground, rng: random.Random, when: str, times: Mapping[str, float], stem: Stem | None, kept: int
) -> _Kill:
    """Start the run of a folder, kill it at such a moment, and look at what is left."""
    one = _Kill(when)
    with own.job(*BIG, stem=(stem, 2) if stem and when != "start" else None) as run:
        made = run.step()
        if when in ("start", "join"):
            if stem is None:
                run.workers(2)
            time.sleep(rng.uniform(0.0, times[when]))
        else:
            run.reaches(TOTAL - 1 if when == "end" else made + rng.randint(1, 3))
            if when == "save":
                job.wait_for(lambda: job.saving(run.run) or run.process.poll() is not None, 30.0, "a save", 0.002)
            time.sleep(rng.uniform(0.0, 0.1 if when == "save" else 0.3))
        over = run.process.poll() is not None
        began = _kill(run, None if stem else rng.choice(run.workers(2)))
        done = run.finish()
        one.seconds, one.cut, one.kept, last = done.ended - began, job.saving(run.run), job.newest(run.run), run.step()
    one.lost = last - max(one.kept, 0)
    promises = {
        f"the run had ended before: {done.said[-800:]}": not over or when == "end",
        f"processes {done.orphans} are left": not done.orphans,
        f"exit code {done.code}, not {DIED}: {done.said[-800:]}": stem is not None or done.code == DIED,
        f"commit {kept} was there, and now {one.kept} is the newest": one.kept >= kept,
        # A save begins once the one before is over, so two of them are all that can be missing.
        f"{one.lost} steps are lost: {one.kept} of {last} can be loaded": one.lost <= 2 * EVERY,
    }
    one.wrong = [what for what, held in promises.items() if not held]
    return one


def _kill(run: job.Job, rank: int | None) -> float:
    """Kill one process of a job, or all of them; returns when."""
    began = time.monotonic()
    for pid in [rank] if rank else [run.process.pid, *run.pids()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return began


def _until_first_step(ground: Ground, when: str, stem: Stem | None) -> float:
    """Seconds from the start of a job to its first step; or, where its ranks join each other, from their start."""
    began = time.monotonic()
    with ground.for_("first").job(*BIG, stem=(stem, 2) if stem and when == "join" else None) as run:
        if when == "join" and stem is None:
            run.workers(2)
            began = time.monotonic()
        run.reaches(1)
        return time.monotonic() - began


def _sentence(kills: list[_Kill]) -> str:
    """How many kills there were at which moments, and how many of them cut a save off."""
    count = Counter(one.when for one in kills)
    told = ", ".join(f"{count[when]} {text}" for when, text in _TOLD.items() if count[when])
    return f"{len(kills)} kills: {told}; {sum(one.cut for one in kills)} of them left half a checkpoint behind"


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
_mid_save("A4e", "kill -9 of rank 0 before a commit's rename", "rename", (0, 2, 3))
_mid_save("A4f", "kill -9 of rank 0 after a commit's rename", "renamed", (0, 2, 3))
_mid_save("A4g", "kill -9 of rank 0 while it deletes an old commit", "rmtree", (0,))
