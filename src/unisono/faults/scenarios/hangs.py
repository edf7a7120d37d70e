"""Ranks that do not do the same: uneven rows, branches, other collectives."""

from __future__ import annotations

import time
from contextlib import ExitStack

from unisono.faults import job
from unisono.faults.job import Job, free_port
from unisono.faults.matrix import Ground, Outcome, fault

REFUSED, DESYNC = 2, 8


@fault("B14", "rows that do not divide by the ranks, with a tail shorter than a batch")
def _uneven(ground: Ground) -> Outcome:
    words = ("train.steps=null", "train.epochs=2", "task.rows=37", "train.precision=fp64")
    alone, many = (ground.unharmed(*words, world=world) for world in (1, 2))
    outcome = Outcome(said="every process makes the same number of passes")
    steps = {where.partition(",")[0] for where in many if where.startswith("step ")}
    outcome.promise(len(steps) == 10, f"{len(steps)} steps, not 10")  # 74 rows in batches of 8
    outcome.promise(alone["step"] == many["step"], "another number of steps on one process")
    return outcome


def _desync(key: str, text: str, act: str, *says: str, quick: bool = False) -> None:
    @fault(key, text, quick=quick)
    def _show(ground: Ground) -> Outcome:
        outcome = ground.harmed(f"{act}@forward:1:7", code=DESYNC, says=("harmed.py:", *says), within=30.0)
        outcome.promise(
            outcome.lost is None or job.last_step(ground.own / "runs" / job.RUN) >= job.STEPS, "not resumed"
        )
        return outcome


_desync("B15", "a branch of one rank leaves a collective out", "skip", "rank 1")
_desync("B16", "collectives of the same shape in another order", "swap", "all_reduce", quick=True)
_desync("B17", "another ReduceOp", "op", "MAX", "SUM")
_desync("B17b", "another dtype, as many bytes", "dtype", "float64", "float32")
_desync("B17c", "another shape", "shape", "all_reduce")


@fault("B18", "a parameter that one rank alone does not use")
def _unused(ground: Ground) -> Outcome:
    return ground.harmed("unused@forward:1:7", code=REFUSED, says=("0.weight", "rank 1"), within=30.0)


@fault("B19", "a collective in what only rank 0 does: evaluation, a log line")
def _lonely(ground: Ground) -> Outcome:
    return ground.harmed("lonely@evaluate:0:12", code=DESYNC, says=("harmed.py:", "rank 0"), within=30.0, goes_on=False)


def _of_two_nodes(key: str, text: str, misbehave: str, *says: str) -> None:
    """Nobody of a node can read the ring of another one's processes; the nodes compare them over the run's folder."""

    @fault(key, text)
    def _show(ground: Ground) -> Outcome:
        outcome, before = Outcome(), ground.unharmed()
        there = f"launch.rendezvous=127.0.0.1:{free_port()}"
        words = ("layout.world_size=2", "launch.nodes=2", "launch.interface=lo", there)
        with ExitStack() as stack:
            jobs = [
                stack.enter_context(
                    Job(ground.own, *words, f"launch.node_rank={n}", misbehave=misbehave, output=f"node-{n}.txt")
                )
                for n in range(2)
            ]
            ends = [each.finish(120) for each in jobs]
            began = job.happened(ground.own)
            outcome.promise(began is not None, "the fault did not happen")
            outcome.seconds = round(max(done.ended for done in ends) - (began or time.monotonic()), 1)
            outcome.said = ends[0].sentence
            outcome.lost = jobs[0].step() - max(job.newest(jobs[0].run), 0)
        for number, done in enumerate(ends):
            outcome.promise(done.code == DESYNC, f"node {number}: {done.code}: {done.said[-1000:]}")
            for word in ("harmed.py:", "rank 0", "rank 1", *says):
                outcome.promise(word in done.sentence, f"node {number}: '{word}' is not said: {done.said[-1000:]}")
        outcome.promise(not ends[0].orphans, f"{ends[0].orphans} are left")
        outcome.promise(outcome.seconds <= 30.0, f"it took {outcome.seconds} s")
        ground.go_on(outcome, before)
        return outcome


_of_two_nodes("B15b", "a branch leaves a collective out, and the two ranks are on two hosts", "skip@forward:1:7")
_of_two_nodes("B17d", "another shape, on two hosts", "shape@forward:1:7", "[3]", "[5]")
_of_two_nodes("B19b", "a collective in what only rank 0 does, on two hosts", "lonely@evaluate:0:12")
