"""Kills at random instants: the run resumes after each, and ends as one that was never killed.

A run is killed ten times before it may end: while its processes start, meet and load, in steps and between them, while
a save is on its way, and after the last step. Two such runs go on at once. Where all processes are killed together,
the ranks are forks of a process with warm imports (`unisono.faults.rank_server`), but for the kills while they start.
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
from unisono.faults.matrix import Outcome, Sandbox, scenario
from unisono.faults.rank_server import RankServer
from unisono.faults.scenarios.death import DIED

KILLS = "UNISONO_KILLS"  # how many instants the random kills take
SEED = 20_261_122
TOTAL, EVERY = 100, 2
# A network of some megabytes: a save takes about as long as the steps between two of them.
BIG = ("task.width=60000", "task.sleep=0.02", f"train.steps={TOTAL}", f"checkpoint.every={EVERY}", "checkpoint.keep=2")
_PHASE_TEXTS = {
    "start": "between the command and its first step",
    "join": "while ranks met, loaded and warmed up",
    "steps": "in steps and between them",
    "save": "once a save had begun",
    "end": "about the last step",
}
# When the ten kills of a run are.
_PHASES_OF_ALL = ("start", "join", "save", "steps", "save", "start", "steps", "join", "save", "end")
_PHASES_OF_ONE = ("join", "steps", "save", "join", "steps", "save", "join", "steps", "save", "steps")


def kill_count() -> int:
    """How many random instants are asked for."""
    return int(os.environ.get(KILLS, "200"))


@scenario("A4", "kill -9 of everything at random instants, of all phases", quick=True)
def _anywhere(sandbox: Sandbox) -> Outcome:
    with RankServer() as server:
        return _run_chains(sandbox, kill_count(), _PHASES_OF_ALL, server)


@scenario("A4b", "kill -9 of one rank at random instants, of all phases")
def _one_anywhere(sandbox: Sandbox) -> Outcome:
    return _run_chains(sandbox, kill_count() // 4, _PHASES_OF_ONE)


@dataclass
class _Kill:
    """One kill.

    Attributes:
        when: a key of `_TOLD`.
        seconds: until the last process was gone.
        cut: whether it left half a checkpoint behind.
        kept: step of the newest commit that can be loaded; -1 if there is none.
        lost: steps that have to be made again.
        broken_promises: promises that were not kept.
    """

    when: str
    seconds: float = 0.0
    cut: bool = False
    kept: int = -1
    lost: int = 0
    broken_promises: list[str] = field(default_factory=list)


def kill_rank(sandbox: Sandbox, rank: int) -> Outcome:
    """Kill the same rank at random instants."""
    return _run_chains(sandbox, kill_count() // 4, _PHASES_OF_ONE, victim=rank)


def _run_chains(
    sandbox: Sandbox,
    count: int,
    phases: tuple[str, ...],
    server: RankServer | None = None,
    victim: int | None = None,
) -> Outcome:
    """So many kills, of all processes where there is a server, else of one rank: the victim, or any."""
    before = sandbox.reference_digests(*BIG)
    times = {when: _seconds_to_first_step(sandbox, when, server) for when in ("start", "join")}
    outcome = Outcome(exact=True)

    def chain(number: int) -> list[_Kill]:
        rng, own, kills = random.Random(f"{SEED} {number}"), sandbox.for_scenario(f"chain{number}"), [_Kill("")]
        for turn, when in enumerate(phases[: count - number * len(phases)]):
            kills.append(_run_and_kill(own, rng, when, times, server, kills[-1].kept, victim))
            kills[-1].broken_promises = [
                f"kill {turn} of chain {number} ({when}): {wrong}" for wrong in kills[-1].broken_promises
            ]
        own.check_resume(outcome, before, *BIG)
        return kills[1:]

    with ThreadPoolExecutor(2) as pool:
        kills = [one for found in pool.map(chain, range(-(-count // len(phases)))) for one in found]
    outcome.broken_promises += [wrong for one in kills for wrong in one.broken_promises]
    outcome.seconds, outcome.lost = round(max(one.seconds for one in kills), 1), max(one.lost for one in kills)
    outcome.said = _format_kills(kills)
    return outcome


def _run_and_kill(
    own: Sandbox,
    rng: random.Random,
    when: str,
    times: Mapping[str, float],
    server: RankServer | None,
    kept: int,
    victim: int | None,
) -> _Kill:
    """Start the run of a folder, kill it at such a moment, and look at what is left."""
    one = _Kill(when)
    with own.job(*BIG, server=(server, 2) if server and when != "start" else None) as run:
        made = run.step()
        rank = None if server else _choose(run.wait_for_ranks(2), rng, victim)
        if when in ("start", "join"):
            with suppress(TimeoutError):  # at its first step at the latest: programs may come from a cache by now
                job.wait_for(lambda: run.step() > made, rng.uniform(0.0, times[when]), "its first step")
        else:
            run.wait_for_step(TOTAL - 1 if when == "end" else made + rng.randint(1, 3))
            if when == "save":
                job.wait_for(lambda: job.is_saving(run.run) or run.process.poll() is not None, 30.0, "a save", 0.002)
            time.sleep(rng.uniform(0.0, 0.1 if when == "save" else 0.3))
        over = run.process.poll() is not None
        began = _kill(run, rank)
        done = run.finish()
        one.seconds, one.cut, one.kept, last = (
            done.ended_at - began,
            job.is_saving(run.run),
            job.newest_step(run.run),
            run.step(),
        )
    one.lost = last - max(one.kept, 0)
    promises = {
        f"the run had ended before: {done.said[-800:]}": not over or when == "end",
        f"processes {done.orphans} are left": not done.orphans,
        f"exit code {done.code}, not {DIED}: {done.said[-800:]}": server is not None or done.code == DIED,
        f"commit {kept} was there, and now {one.kept} is the newest": one.kept >= kept,
        # A save begins once the one before is over, so two of them are all that can be missing.
        f"{one.lost} steps are lost: {one.kept} of {last} can be loaded": one.lost <= 2 * EVERY,
    }
    one.broken_promises = [what for what, held in promises.items() if not held]
    return one


def _choose(ranks: list[int], rng: random.Random, victim: int | None) -> int:
    """The process of the victim, or any."""
    return rng.choice(ranks) if victim is None else ranks[victim]


def _kill(run: job.Job, rank: int | None) -> float:
    """Kill one process of a job, or all of them; returns when."""
    began = time.monotonic()
    for pid in [rank] if rank else [run.process.pid, *run.pids()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return began


def _seconds_to_first_step(sandbox: Sandbox, when: str, server: RankServer | None) -> float:
    """Seconds from the start of a job to its first step; or, where its ranks join each other, from their start."""
    began = time.monotonic()
    with sandbox.for_scenario("first").job(*BIG, server=(server, 2) if server and when == "join" else None) as run:
        if when == "join" and server is None:
            run.wait_for_ranks(2)
            began = time.monotonic()
        run.wait_for_step(1)
        return time.monotonic() - began


def _format_kills(kills: list[_Kill]) -> str:
    """How many kills there were at which moments, and how many of them cut a save off."""
    count = Counter(one.when for one in kills)
    phases = ", ".join(f"{count[when]} {text}" for when, text in _PHASE_TEXTS.items() if count[when])
    return f"{len(kills)} kills: {phases}; {sum(one.cut for one in kills)} of them left half a checkpoint behind"


def _add_mid_save_kill(key: str, text: str, where: str, numbers: tuple[int, ...]) -> None:
    """Rows of the matrix: rank 0 is killed in the n-th such call of the operating system."""

    @scenario(key, text)
    def _act(sandbox: Sandbox) -> Outcome:
        total = Outcome(exact=True, lost=0)
        for number in numbers:
            found = sandbox.for_scenario(f"{key}-{number}").run_harmed(
                f"kill@{where}:0:{number}", code=DIED, says=("rank 0", "signal 9")
            )
            total.broken_promises += [f"call {number}: {wrong}" for wrong in found.broken_promises]
            total.seconds = max(total.seconds or 0.0, found.seconds or 0.0)
            total.lost = max(total.lost or 0, found.lost or 0)
            total.exact = bool(total.exact and found.exact)
            total.said = found.said
        return total


_add_mid_save_kill("A4c", "kill -9 of rank 0 before what it wrote is flushed to the disk", "fsync", (2, 5, 8, 12))
_add_mid_save_kill("A4d", "kill -9 of rank 0 just after a flush to the disk", "fsynced", (2, 5, 8, 12))
_add_mid_save_kill("A4e", "kill -9 of rank 0 before a commit's rename", "rename", (0, 2, 3))
_add_mid_save_kill("A4f", "kill -9 of rank 0 after a commit's rename", "renamed", (0, 2, 3))
_add_mid_save_kill("A4g", "kill -9 of rank 0 while it deletes an old commit", "rmtree", (0,))
