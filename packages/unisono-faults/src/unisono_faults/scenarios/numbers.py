"""Non-finite numbers, and replicas that diverge."""

from __future__ import annotations

from unisono_faults import job
from unisono_faults.matrix import GUARD, NOT_FINITE, AbstainError, Outcome, Sandbox, scenario


@scenario("D32", "a NaN loss on one rank")
def _loss(sandbox: Sandbox) -> Outcome:
    return sandbox.run_with_fault("nan@loss:1:7", code=NOT_FINITE, says=("step 8", "rows"))


@scenario("D33", "a NaN gradient on one rank")
def _gradient(sandbox: Sandbox) -> Outcome:
    return sandbox.run_with_fault("nan@backward:1:7", code=NOT_FINITE, says=("step 8",))


@scenario("D33b", "an overflow on one rank with fp16 loss scaling")
def _scale(sandbox: Sandbox) -> Outcome:
    raise AbstainError("no fp16 on this device: bf16 has the range of fp32 and needs no loss scaling")


@scenario("D34", "a replica that drifts from the others by 1e-6")
def _drift(sandbox: Sandbox) -> Outcome:
    return sandbox.run_with_fault(
        "drift@update:1:4", "train.guard_every=6", code=GUARD, says=("rank", "0.weight"), within=30.0
    )


@scenario("D34b", "the same just before a save, between two replica checks: not saved")
def _drift_before_a_save(sandbox: Sandbox) -> Outcome:
    return _run_not_saved(sandbox, "drift@update:1:4", "'0.weight'")


@scenario("D34c", "one replica's optimizer moment drifts while its parameters still agree")
def _moment(sandbox: Sandbox) -> Outcome:
    return _run_not_saved(sandbox, "drift@updated:1:5", "'optimizer/0.weight/exp_avg'")


def _run_not_saved(sandbox: Sandbox, fault: str, name: str) -> Outcome:
    """A fault in steps 4 to 6 is detected when the checkpoint of step 6 is due; that of step 3 stays the newest."""
    words = (f"train.guard_every={10**6}",)
    outcome = sandbox.run_with_fault(
        fault, *words, code=GUARD, says=("step 6", "rank", name), within=30.0, resumes=False
    )
    newest = job.newest_step(sandbox.folder / "runs" / job.RUN)
    outcome.check(newest == job.EVERY, f"the newest checkpoint is that of step {newest}")
    sandbox.check_resume(outcome, sandbox.reference_digests(*words), *words)
    return outcome


@scenario("D35", "a corrupt gradient on one rank before the reduction: replay finds the step")
def _corrupt_gradient(sandbox: Sandbox) -> Outcome:
    """Every rank receives the same wrong sum, so comparing ranks cannot detect it; the run ends with wrong numbers."""
    words = ("checkpoint.keep=9",)
    before = sandbox.reference_digests(*words)
    outcome, trained = Outcome(), sandbox.run(*words, fault="flip@backward:1:7")
    outcome.expect(trained, 0)
    outcome.check(job.fault_time(sandbox.folder) is not None, "the fault did not happen")
    outcome.check(job.read_digests(trained.run) != before, "the fault changed nothing")
    for first, code, says in ((6, 1, "the first step that differs is step 8: "), (9, 0, "bit for bit")):
        done = sandbox.run_verb("replay", str(trained.run), "--task", f"{job.TASK}:Small", "--from", str(first))
        outcome.expect(done, code, says, name=f"the replay from step {first}")
        outcome.message = done.line_with(says) if code else outcome.message
    outcome.exact = not outcome.broken_promises
    return outcome
