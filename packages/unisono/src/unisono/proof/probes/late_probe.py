"""What begins in a later step, as after a warm-up: a memory, a statistic of the batch, a term that belongs to no row.

The other probes see the first step. Once all is recorded, the last step's passes are tried as well, and those of steps
that no run of a proof reaches; a few of them show whether there is anything to look for.
"""

from __future__ import annotations

import time

from unisono.data.loading.checksum import checksum
from unisono.proof.probes.loss_probe import probe_loss
from unisono.proof.probes.model_probe import (
    copy_row,
    find_carried,
    find_other,
    find_rowless_buffers,
    make_pass,
    probe_model,
)
from unisono.proof.probes.state import digest_kept
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts
from unisono.runtime.text import join_names

LATER = (10, 100, 1_000, 10_000, 100_000)  # steps that passes are told they are in
_ROWS = 4  # that are tried alone
_PASSES = 64  # after which a state that counts them may have come to where it is read
_SECONDS = 1.0  # of the processor for these, at most
_OF_ROWS = ("neighbours", "beside", "normalised", "dependent", "mixed")


def probe_late(facts: RunFacts, trial: Trial, step: int) -> None:
    """Look in a later step for what the first one has not shown.

    Args:
        facts: of the first step; what is found is added.
        trial: of a micro-batch of the later step, whose passes are given that step.
        step: its number, from 1.
    """
    _forget_unread(facts, trial, step)
    if _is_known(facts):
        return
    with trial.undone():
        carried = find_carried(trial)
        # A counter of passes, which layouts have otherwise, is no memory of rows.
        facts.carried = carried if carried and {*carried} - {*find_rowless_buffers(trial)} else []
    fixed = trial.with_same_buffers() if facts.carried else trial
    if not _is_sum_of_rows(fixed):
        found = RunFacts()
        probe_model(found, fixed)
        if found.unrepeatable:
            return
        for name in _OF_ROWS:
            setattr(facts, name, getattr(found, name))
        if facts.dependent:
            facts.dependent = f"in step {step}, and not in step 1, {facts.dependent}"
        if not found.neighbours:
            probe_loss(found, fixed)
            facts.additivity, facts.by_number = found.additivity, found.by_number
            if found.unstable_loss:
                facts.unstable_loss = f"in step {step}, and not in step 1, {found.unstable_loss}"


def probe_later(facts: RunFacts, trial: Trial, step: int) -> None:
    """Look for a loss that is the sum of its rows in all that is recorded, and not in a step that is never reached.

    Args:
        facts: of the first step; what is found is added.
        trial: of a micro-batch whose passes are told that they are of that step.
        step: its number, from 1.
    """
    if _is_known(facts) or facts.later_terms or facts.normalised or _is_sum_of_rows(trial):
        return
    probe_model(found := RunFacts(), trial)
    if not (found.unrepeatable or found.neighbours):
        probe_loss(found, trial)
        facts.later_terms, facts.later_step = found.additivity, step


def _is_known(facts: RunFacts) -> bool:
    """Whether it is known already why rows together are another computation than each alone."""
    of_rows = facts.carried or facts.neighbours or facts.additivity
    return bool(of_rows or facts.unstable_loss or facts.unrepeatable)


def _forget_unread(facts: RunFacts, trial: Trial, step: int) -> None:
    """Forget what passes change and none reads: a counter that is only reported is no reason of anything.

    One that is read once it has come to some number is read: passes of the same rows come to another loss then.
    """
    view, task = trial.view, trial.task

    def digest() -> tuple[dict[str, int], dict[str, int]]:
        buffers = {name: checksum(value) for name, value in view.whole("buffers").items()}
        return digest_kept(task, trial.model, caches=False), buffers

    if not (facts.kept_by_task or facts.late_buffers):
        return
    with trial.undone():
        before, once = digest(), make_pass(trial, trial.copy())
        trial.sums(trial.copy(copy_row(trial.micro, 0)))
        now, again = digest(), make_pass(trial, trial.copy())
        if find_other(once, again, trial.floor) or not any(once[1].values()):  # half of a loss of 0 is 0
            return
        passes = _repeat(trial)
        other = find_other(once, make_pass(trial, trial.copy()), trial.floor)
    if other:
        facts.unstable_loss = (
            f"in step {step}, {other} of the same rows came to something else after {passes} more passes, which "
            f"change {facts.kept_by_task or join_names(facts.late_buffers)}"
        )
        return
    kept, buffers = ([name for name in new if new[name] != old.get(name)] for old, new in zip(before, now, strict=True))
    if facts.kept_by_task == join_names(kept):
        facts.kept_by_task = ""
    facts.late_buffers = [name for name in facts.late_buffers if name not in buffers]


def _repeat(trial: Trial) -> int:
    """Make passes over the same rows, as many as may show what counts them; returns how many."""
    began, passes = time.process_time(), 0
    while passes < _PASSES and time.process_time() - began < _SECONDS:
        trial.sums(trial.copy())
        passes += 1
    return passes


def _is_sum_of_rows(trial: Trial) -> bool:
    """Whether the loss of some rows is the sum of what each has alone, in any order; also where that cannot be tried.

    None can be taken then, or passes draw: rows alone get other numbers than together.
    """
    rows = range(min(trial.micro.size, _ROWS))
    if len(rows) < 3 or not trial.can_take or trial.draws():
        return True
    with trial.undone():
        once = trial.sums(trial.take(rows))
        each = [trial.sums(trial.take([row])) for row in rows]
        turned = trial.sums(trial.take([1, 0, *rows[2:]]))
    for name, value in once.items():
        alone = [sums[name] for sums in each]
        limit = trial.floor * max(map(abs, [value, *alone]))
        if abs(sum(alone) - value) > limit or abs(turned[name] - value) > limit:
            return False
    return True
