"""Kills at random instants: the run resumes after each, and gives the same result as one that was never killed.

A run is killed ten times before it may end: while its processes start, meet and load, in steps and between them, while
a save is in progress, and after the last step. Two such runs execute at once. If all processes are killed together,
the ranks are forks of a process with warm imports (`unisono_faults.rank_server`), but for the kills while they start.
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

from unisono_faults import job
from unisono_faults.matrix import DIED, Outcome, Sandbox, scenario
from unisono_faults.rank_server import RankServer

KILLS = "UNISONO_KILLS"  # the number of random kills
SEED = 20_261_122
TOTAL, EVERY = 100, 2
# A network of some megabytes: a save takes about as long as the steps between two of them.
BIG = ("task.width=60000", "task.sleep=0.02", f"train.steps={TOTAL}", f"checkpoint.every={EVERY}", "checkpoint.keep=2")
_PHASE_TEXTS = {
    "start": "before the first step",
    "join": "while ranks connected, loaded and warmed up",
    "steps": "in or between steps",
    "save": "during a save",
    "end": "around the last step",
}
# When the ten kills of a run are.
_PHASES_OF_ALL = ("start", "join", "save", "steps", "save", "start", "steps", "join", "save", "end")
_PHASES_OF_ONE = ("join", "steps", "save", "join", "steps", "save", "join", "steps", "save", "steps")


def kill_count() -> int:
    """The number of random instants."""
    return int(os.environ.get(KILLS, "200"))


@scenario("A4", "kill -9 of all processes at random instants of every phase")
def _anywhere(sandbox: Sandbox) -> Outcome:
    with RankServer() as server:
        return _run_chains(sandbox, kill_count(), _PHASES_OF_ALL, server)


@scenario("A4b", "kill -9 of one rank at random instants of every phase")
def _one_anywhere(sandbox: Sandbox) -> Outcome:
    return _run_chains(sandbox, kill_count() // 4, _PHASES_OF_ONE)


@dataclass
class _Kill:
    """One kill.

    Attributes:
        moment: a key of `_PHASE_TEXTS`.
        seconds: until the last process was gone.
        interrupted_save: whether it left an unfinished checkpoint.
        saved_step: step of the newest checkpoint that can be loaded; -1 if there is none.
        lost_steps: steps that have to be repeated.
        broken_promises: promises that did not hold.
    """

    moment: str
    seconds: float = 0.0
    interrupted_save: bool = False
    saved_step: int = -1
    lost_steps: int = 0
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
    """Kill a run `count` times: all processes if there is a server, else one rank, the victim or any."""
    before = sandbox.reference_digests(*BIG)
    times = {when: _seconds_to_first_step(sandbox, when, server) for when in ("start", "join")}
    outcome = Outcome(exact=True)

    def chain(number: int) -> list[_Kill]:
        rng, kills = random.Random(f"{SEED} {number}"), [_Kill("")]
        chain_sandbox = sandbox.for_scenario(f"chain{number}")
        for turn, when in enumerate(phases[: count - number * len(phases)]):
            kills.append(_run_and_kill(chain_sandbox, rng, when, times, server, kills[-1].saved_step, victim))
            kills[-1].broken_promises = [
                f"kill {turn} of chain {number} ({when}): {problem}" for problem in kills[-1].broken_promises
            ]
        chain_sandbox.check_resume(outcome, before, *BIG)
        return kills[1:]

    with ThreadPoolExecutor(2) as pool:
        kills = [kill for chained in pool.map(chain, range(-(-count // len(phases)))) for kill in chained]
    outcome.broken_promises += [problem for kill in kills for problem in kill.broken_promises]
    outcome.seconds, outcome.lost_steps = (
        round(max(kill.seconds for kill in kills), 1),
        max(kill.lost_steps for kill in kills),
    )
    outcome.message = _format_kills(kills)
    return outcome


def _run_and_kill(
    sandbox: Sandbox,
    rng: random.Random,
    moment: str,
    times: Mapping[str, float],
    server: RankServer | None,
    saved_before: int,
    victim: int | None,
) -> _Kill:
    """Start the run of a folder, kill it at a random instant of a moment, and check what is left."""
    kill = _Kill(moment)
    with sandbox.job(*BIG, server=(server, 2) if server and moment != "start" else None) as run:
        first_step = run.step()
        rank = None if server else _choose(run.wait_for_ranks(2), rng, victim)
        if moment in ("start", "join"):
            with suppress(TimeoutError):  # at its first step at the latest: programs may be cached by now
                job.wait_for(lambda: run.step() > first_step, rng.uniform(0.0, times[moment]), "its first step")
        else:
            run.wait_for_step(TOTAL - 1 if moment == "end" else first_step + rng.randint(1, 3))
            if moment == "save":
                job.wait_for(lambda: job.is_saving(run.run) or run.process.poll() is not None, 30.0, "a save", 0.002)
            time.sleep(rng.uniform(0.0, 0.1 if moment == "save" else 0.3))
        ended_before = run.process.poll() is not None
        began = _kill(run, rank)
        done = run.finish()
        kill.seconds, kill.interrupted_save, kill.saved_step, last = (
            done.ended_at - began,
            job.is_saving(run.run),
            job.newest_step(run.run),
            run.step(),
        )
    kill.lost_steps = last - max(kill.saved_step, 0)
    promises = {
        f"the run had ended before: {done.output[-800:]}": not ended_before or moment == "end",
        f"processes {done.orphans} are still running": not done.orphans,
        f"exit code {done.code}, not {DIED}: {done.output[-800:]}": server is not None or done.code == DIED,
        f"checkpoint {saved_before} existed, and now {kill.saved_step} is the newest": kill.saved_step >= saved_before,
        # A save begins once the kill before is over, so two of them are all that can be missing.
        f"{kill.lost_steps} steps are lost: {kill.saved_step} of {last} can be loaded": kill.lost_steps <= 2 * EVERY,
    }
    kill.broken_promises = [problem for problem, holds in promises.items() if not holds]
    return kill


def _choose(ranks: list[int], rng: random.Random, victim: int | None) -> int:
    """The process of the victim, or a random one."""
    return rng.choice(ranks) if victim is None else ranks[victim]


def _kill(run: job.Job, rank: int | None) -> float:
    """Kill one process of a job, or all of them; return the time."""
    began = time.monotonic()
    for pid in [rank] if rank else [run.process.pid, *run.pids()]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return began


def _seconds_to_first_step(sandbox: Sandbox, when: str, server: RankServer | None) -> float:
    """Seconds to the first step from the start of a job or, for `join`, from the start of its ranks."""
    began = time.monotonic()
    with sandbox.for_scenario("first").job(*BIG, server=(server, 2) if server and when == "join" else None) as run:
        if when == "join" and server is None:
            run.wait_for_ranks(2)
            began = time.monotonic()
        run.wait_for_step(1)
        return time.monotonic() - began


def _format_kills(kills: list[_Kill]) -> str:
    """Format the number of kills at each moment, and how many of them interrupted a save."""
    count = Counter(kill.moment for kill in kills)
    phases = ", ".join(f"{count[when]} {text}" for when, text in _PHASE_TEXTS.items() if count[when])
    interrupted = sum(kill.interrupted_save for kill in kills)
    return f"{len(kills)} kills: {phases}; {interrupted} of them left an unfinished checkpoint"


def _add_mid_save_kill(key: str, text: str, where: str, numbers: tuple[int, ...]) -> None:
    """Add a row of the matrix: rank 0 is killed in the n-th such system call."""

    @scenario(key, text)
    def _act(sandbox: Sandbox) -> Outcome:
        total = Outcome(exact=True, lost_steps=0)
        for number in numbers:
            found = sandbox.for_scenario(f"{key}-{number}").run_with_fault(
                f"kill@{where}:0:{number}", code=DIED, says=("rank 0", "signal 9")
            )
            total.broken_promises += [f"call {number}: {problem}" for problem in found.broken_promises]
            total.seconds = max(total.seconds or 0.0, found.seconds or 0.0)
            total.lost_steps = max(total.lost_steps or 0, found.lost_steps or 0)
            total.exact = bool(total.exact and found.exact)
            total.message = found.message
        return total


_add_mid_save_kill("A4c", "kill -9 of rank 0 before a flush to disk", "fsync", (2, 5, 8, 12))
_add_mid_save_kill("A4d", "kill -9 of rank 0 just after a flush to disk", "fsynced", (2, 5, 8, 12))
_add_mid_save_kill("A4e", "kill -9 of rank 0 before the rename that publishes a checkpoint", "rename", (0, 2, 3))
_add_mid_save_kill("A4f", "kill -9 of rank 0 after the rename that publishes a checkpoint", "renamed", (0, 2, 3))
_add_mid_save_kill("A4g", "kill -9 of rank 0 while it deletes an old checkpoint", "rmtree", (0,))
