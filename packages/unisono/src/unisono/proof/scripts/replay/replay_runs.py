"""Which runs of a script are compared with which: with one process on its own rows, or on those of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.proof import comparison
from unisono.proof.cases import EPSILON, Case
from unisono.proof.judgement import FLOOR
from unisono.proof.scripts.judging import script_rows
from unisono.proof.scripts.judging.gradient_sums import find_differing
from unisono.proof.scripts.judging.script_comparison import ScriptRuns, find_local_statistics
from unisono.proof.scripts.recording.rank_facts import ScriptTrace, count_inputs
from unisono.proof.scripts.replay.reading import read_reading
from unisono.proof.scripts.replay.replay_plan import ReplayPlan, explain_failure, plan_replay


@dataclass(frozen=True)
class Group:
    """Runs that are compared with the same run on one process.

    Attributes:
        one: that run.
        again: the same, with weights changed in their last bit.
        many: the others.
        plan: how `one` is given the rows of the only other; None if it reads its own.
        reason: why these are others.
    """

    one: Case
    again: Case
    many: list[Case]
    plan: ReplayPlan | None = None
    reason: str = ""

    @property
    def cases(self) -> list[Case]:
        """All of them, in order."""
        return [self.one, self.again, *self.many]


def record_on_their_rows(runs: ScriptRuns, case: Case, asked: int) -> Group | None:
    """Run one process on the rows that the ranks of a case have read, if these are not those of one process.

    None if one process is to be compared as it is: its rows are the same, no run has come to its end, or the rows of
    the ranks cannot be given to it. The reason for the last is noted in `runs.left`.

    Args:
        runs: of the script.
        case: of several processes.
        asked: updates that are compared in any case.
    """
    one = runs.cases[0]
    if case.name not in runs.traces:
        return None
    trace, reference = runs.traces[case.name], runs.traces[one.name]
    script_rows.count_shared_rows_once(trace, reference)
    if script_rows.drop_own_numbers(trace, reference):
        runs.own_numbers.add(case.name)
    reason, _ = script_rows.explain_other_rows(trace, reference)
    if not reason or _agree(trace, reference):
        return None
    plan = plan_replay(trace, reference)
    if plan.how is None:
        runs.left[case.name] = plan.why
        return None
    _cut_before_other_epochs(trace, reference)
    name = f"1 process, on the rows of {case.world_size}"
    on_theirs = Case(name, 1, {}, case.precision)
    again = replace(on_theirs, name=f"{name}, perturbed", perturbed=EPSILON[case.precision])
    for own in (on_theirs, again):
        runs.changes[own.name] = {
            "rows_of": trace.folder.name, "ranks": [*range(case.world_size)], "how": plan.how,
            "steps": len(trace.facts.steps),  # after which it would read rows of its own
        }  # fmt: skip
    replayed = runs.record(on_theirs)
    if replayed is None:
        runs.left[case.name] = f"one process cannot compute with them: {runs.ended.pop(on_theirs.name)}"
        return None
    leave_out_rounded_rows(trace, replayed, asked)
    if why := explain_failure(trace, replayed, reference):
        runs.left[case.name] = why
        return None
    runs.changes[again.name]["steps"] = len(trace.facts.steps)
    runs.record(again)
    trace.facts.per_process = find_local_statistics(trace, replayed)
    return Group(on_theirs, again, [replace(case, reference=name)], plan, reason)


def _cut_before_other_epochs(trace: ScriptTrace, reference: ScriptTrace) -> None:
    """Leave out what follows an epoch that the ranks end at another update than one process: it acts by the epoch."""
    readings = [read_reading(run.folder, 0) for run in (trace, reference)]
    begins = {reading.next_epoch for reading in readings if reading and reading.next_epoch}
    if len(begins) > 1 and 1 < min(begins) <= len(trace.facts.steps):
        trace.leave_out_from(min(begins))


def leave_out_rounded_rows(trace: ScriptTrace, replayed: ScriptTrace, asked: int) -> None:
    """Leave out the updates, behind those asked for, from which on some rows reach the model with other digits.

    What another model has made of them (a generator) differs by rounding, which grows, and is told by its digest. So a
    few rows are others; of rows that are drawn or mixed most are, and the case is left to `explain_failure`.
    """
    for step, (ranks, one) in enumerate(zip(trace.ranks, replayed.ranks, strict=False), 1):
        wanted, given = count_inputs(ranks), count_inputs(one)
        if wanted == given:
            continue
        if step > asked and 2 * (wanted - given).total() <= wanted.total():
            trace.leave_out_from(step)
            replayed.leave_out_from(step)
        return


def leave_out_rounding(runs: ScriptRuns, group: Group, asked: int) -> None:
    """Leave out the updates from which on rounding comes to more than before, so that they widen no tolerance.

    Args:
        runs: of the script.
        group: of which the pair on one process shows what rounding comes to.
        asked: updates that are compared in any case, and the first one of the second epoch.
    """
    if any(case.name not in runs.traces for case in (group.one, group.again)):
        return
    one, again = runs.traces[group.one.name], runs.traces[group.again.name]
    reading = read_reading(one.folder, 0)
    kept = max(asked, reading.next_epoch if reading else 0)
    if len(one.facts.steps) <= kept:
        return
    apart = comparison.measure_distances(again, one)
    least = {quantity: FLOOR[one.precision] for quantity, _ in apart}
    for (quantity, step), size in apart.items():
        if step <= kept:
            least[quantity] = max(least[quantity], comparison.MARGIN * size)
    grown = [step for (quantity, step), size in apart.items() if step > kept and size > least[quantity]]
    for case in group.cases if grown else ():
        if (trace := runs.traces.get(case.name)) is not None:
            trace.leave_out_from(min(grown))


def _agree(trace: ScriptTrace, reference: ScriptTrace) -> bool:
    """Whether all gradients agree, so that what differs of the inputs (padding) is nothing that was computed with."""
    moment, steps = "raw gradients", min(len(trace.ranks), len(reference.ranks))
    pairs = [(trace.tensors(moment, step), reference.tensors(moment, step)) for step in range(steps)]
    return all(mine and not find_differing(mine, one, trace.precision) for mine, one in pairs)
