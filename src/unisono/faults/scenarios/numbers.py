"""Numbers that are not finite, and replicas that leave each other."""

from __future__ import annotations

from unisono.faults import job
from unisono.faults.matrix import AbstainError, Outcome, Sandbox, scenario

NOT_FINITE, GUARD = 3, 4


@scenario("D32", "a loss that is not a number, on one rank")
def _loss(sandbox: Sandbox) -> Outcome:
    return sandbox.run_harmed("nan@loss:1:7", code=NOT_FINITE, says=("step 8", "rows"))


@scenario("D33", "a gradient that is not a number, on one rank")
def _gradient(sandbox: Sandbox) -> Outcome:
    return sandbox.run_harmed("nan@backward:1:7", code=NOT_FINITE, says=("step 8",))


@scenario("D33b", "an overflow on one rank, and the scale of the loss in fp16")
def _scale(sandbox: Sandbox) -> Outcome:
    raise AbstainError("there is no fp16 here, and so no scale: bf16 has the range of fp32")


@scenario("D34", "a replica that leaves the others by 1e-6")
def _drift(sandbox: Sandbox) -> Outcome:
    return sandbox.run_harmed(
        "drift@update:1:4", "train.guard_every=6", code=GUARD, says=("rank", "0.weight"), within=30.0
    )


@scenario("D34b", "the same just before a checkpoint, between two checks of replicas: it is not saved")
def _drift_before_a_save(sandbox: Sandbox) -> Outcome:
    return _run_not_saved(sandbox, "drift@update:1:4", "'0.weight'")


@scenario("D34c", "a moment of one replica's optimizer leaves the others, and the parameters are still the same")
def _moment(sandbox: Sandbox) -> Outcome:
    return _run_not_saved(sandbox, "drift@updated:1:5", "'optimizer/0.weight/exp_avg'")


def _run_not_saved(sandbox: Sandbox, misbehave: str, name: str) -> Outcome:
    """What happens in steps 4 to 6 is seen when the checkpoint of step 6 is due; that of step 3 stays the newest."""
    words = (f"train.guard_every={10**6}",)
    outcome = sandbox.run_harmed(
        misbehave, *words, code=GUARD, says=("step 6", "rank", name), within=30.0, resumes=False
    )
    kept = job.newest_step(sandbox.own / "runs" / job.RUN)
    outcome.check(kept == job.EVERY, f"the newest checkpoint is that of step {kept}")
    sandbox.check_resume(outcome, sandbox.reference_digests(*words), *words)
    return outcome


@scenario("D35", "a gradient of one rank is wrong before the reduction: a replay finds the step")
def _corrupt(sandbox: Sandbox) -> Outcome:
    """What every rank receives alike no comparison of ranks can see; the run ends well, with other numbers."""
    words = ("checkpoint.keep=9",)
    before = sandbox.reference_digests(*words)
    with sandbox.job(*words, misbehave="flip@backward:1:7") as run:
        done = run.finish()
        outcome = Outcome()
        outcome.check(done.code == 0 and job.fault_time(sandbox.own) is not None, f"{done.code}: {done.said[-1500:]}")
        outcome.check(job.read_digests(run.run) != before, "the fault changed nothing")
    for first, code, says in ((6, 1, "the first step that differs is step 8: "), (9, 0, "bit for bit")):
        with job.Job(
            sandbox.own,
            command=job.verb_command("replay", str(run.run), "--task", f"{job.TASK}:Small", "--from", str(first)),
        ) as again:
            done = again.finish()
        outcome.check(done.code == code and says in done.said, f"from step {first}: {done.code}: {done.said[-1500:]}")
        if code:
            outcome.said = next((line.strip() for line in done.said.splitlines() if says in line), "")
    outcome.exact = not outcome.broken_promises
    return outcome
