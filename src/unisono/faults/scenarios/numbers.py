"""Numbers that are not finite, and replicas that leave each other."""

from __future__ import annotations

from unisono.faults import job
from unisono.faults.matrix import Abstain, Ground, Outcome, fault

NOT_FINITE, GUARD = 3, 4


@fault("D32", "a loss that is not a number, on one rank")
def _loss(ground: Ground) -> Outcome:
    return ground.harmed("nan@loss:1:7", code=NOT_FINITE, says=("step 8", "rows"))


@fault("D33", "a gradient that is not a number, on one rank")
def _gradient(ground: Ground) -> Outcome:
    return ground.harmed("nan@backward:1:7", code=NOT_FINITE, says=("step 8",))


@fault("D33b", "an overflow on one rank, and the scale of the loss in fp16")
def _scale(ground: Ground) -> Outcome:
    raise Abstain("there is no fp16 here, and so no scale: bf16 has the range of fp32")


@fault("D34", "a replica that leaves the others by 1e-6")
def _drift(ground: Ground) -> Outcome:
    return ground.harmed("drift@update:1:4", "train.guard_every=6", code=GUARD, says=("rank", "0.weight"), within=30.0)


@fault("D34b", "the same just before a checkpoint, between two checks of replicas: it is not saved")
def _drift_before_a_save(ground: Ground) -> Outcome:
    return _not_saved(ground, "drift@update:1:4", "'0.weight'")


@fault("D34c", "a moment of one replica's optimizer leaves the others, and the parameters are still the same")
def _moment(ground: Ground) -> Outcome:
    return _not_saved(ground, "drift@updated:1:5", "'optimizer/0.weight/exp_avg'")


def _not_saved(ground: Ground, misbehave: str, name: str) -> Outcome:
    """What happens in steps 4 to 6 is seen when the checkpoint of step 6 is due; that of step 3 stays the newest."""
    words = (f"train.guard_every={10**6}",)
    outcome = ground.harmed(misbehave, *words, code=GUARD, says=("step 6", "rank", name), within=30.0, goes_on=False)
    kept = job.newest(ground.own / "runs" / job.RUN)
    outcome.promise(kept == job.EVERY, f"the newest checkpoint is that of step {kept}")
    ground.go_on(outcome, ground.unharmed(*words), *words)
    return outcome


@fault("D35", "a gradient of one rank is wrong before the reduction: the steps made again tell, and which")
def _corrupt(ground: Ground) -> Outcome:
    """What every rank receives alike no comparison of ranks can see; the run ends well, with other numbers."""
    words = ("checkpoint.keep=9",)
    before = ground.unharmed(*words)
    with ground.job(*words, misbehave="flip@backward:1:7") as run:
        done = run.finish()
        outcome = Outcome()
        outcome.promise(done.code == 0 and job.happened(ground.own) is not None, f"{done.code}: {done.said[-1500:]}")
        outcome.promise(job.state(run.run) != before, "the fault changed nothing")
    for first, code, says in ((6, 1, "the first step that differs is step 8: "), (9, 0, "bit for bit")):
        with job.Job(
            ground.own, command=job.verb("replay", str(run.run), "--task", f"{job.TASK}:Small", "--from", str(first))
        ) as again:
            done = again.finish()
        outcome.promise(done.code == code and says in done.said, f"from step {first}: {done.code}: {done.said[-1500:]}")
        if code:
            outcome.said = next((line.strip() for line in done.said.splitlines() if says in line), "")
    outcome.exact = not outcome.wrong
    return outcome
