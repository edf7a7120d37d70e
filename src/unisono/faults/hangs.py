"""Ranks that do not do the same: uneven rows, branches, other collectives."""

from __future__ import annotations

from unisono.faults import job
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
