"""Numbers that are not finite, and replicas that leave each other."""

from __future__ import annotations

from unisono.faults.matrix import Abstain, Ground, Outcome, fault

NOT_FINITE, GUARD = 3, 4


@fault("D32", "a loss that is not a number, on one rank")
def _loss(ground: Ground) -> Outcome:
    return ground.harmed("nan@loss:1:7", code=NOT_FINITE, says=("step 8", "rows"))


@fault("D33", "a gradient that is not a number, on one rank")
def _gradient(ground: Ground) -> Outcome:
    return ground.harmed("nan@backward:1:7", code=NOT_FINITE, says=("step 8",))


@fault("D34", "a replica that leaves the others by 1e-6")
def _drift(ground: Ground) -> Outcome:
    return ground.harmed("drift@update:1:4", "train.guard_every=6", code=GUARD, says=("rank", "0.weight"), within=30.0)


@fault("D35", "a gradient of one rank is wrong before the reduction")
def _corrupt(ground: Ground) -> Outcome:
    raise Abstain(
        "what every rank receives alike no comparison of ranks can see; it takes the step made again on other hardware "
        "(`unisono prove` on the machine in question does that for a few steps)"
    )
