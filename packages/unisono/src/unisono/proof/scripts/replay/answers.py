"""The two questions of a script, in words: do many compute what one computes, and do they read what one reads?"""

from __future__ import annotations

import dataclasses

from unisono.proof import comparison
from unisono.proof.comparison import ComparedQuantity
from unisono.proof.diagnoses import diagnosis
from unisono.proof.recording.trace import QUANTITIES
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.replay.reading import read_reading
from unisono.proof.scripts.replay.replay_plan import NUMBERS, reads_numbers
from unisono.proof.scripts.replay.replay_runs import Group
from unisono.proof.scripts.replay.rows_read import PER_DEVICE, ROWS, describe_rates, describe_size, judge_reading
from unisono.proof.verdict import Verdict

_RATE = "learning rate"


def answer_by_replay(
    judged: Verdict, group: Group, mine: ScriptTrace, replayed: ScriptTrace, plain: ScriptTrace, own_numbers: bool
) -> None:
    """Complete the verdict of a run that was compared with one process on the same rows.

    Args:
        judged: its verdict, from that comparison.
        group: the runs.
        mine: of several processes.
        replayed: of one, on their rows and at their rates.
        plain: of one, on its own.
        own_numbers: whether ranks number the rows of data sets of their own.
    """
    if judged.first is not None and reads_numbers(replayed):
        judged.compared = [
            dataclasses.replace(one, mark="ABSTAIN", why=NUMBERS) if one.mark == "FAIL" else one
            for one in judged.compared
        ]
        judged.diagnosis = judged.diagnosis if judged.first else None
    reading = read_reading(replayed.folder, 0)
    rows, likely = judge_reading(mine, plain, group.reason, own_numbers, reading.scaled if reading else "")
    rates = _compare_rates(mine, plain)
    judged.compared = [rates if one.quantity == _RATE else one for one in judged.compared]
    judged.invariants.append(rows)
    if likely is not None and (judged.first is rows or judged.diagnosis is None):
        judged.diagnosis = likely
    elif judged.first is rates:
        judged.diagnosis = diagnosis.diagnose(mine, plain, [rates], len(mine.ranks[0]))


def _compare_rates(mine: ScriptTrace, plain: ScriptTrace) -> ComparedQuantity:
    """Hold the learning rates against those of one process as it is."""
    (rates,) = (c for c in comparison.compare_traces(mine, plain, _EXACT, adaptive=False) if c.quantity == _RATE)
    size = describe_size(mine, plain)
    why = f"{PER_DEVICE}: {describe_rates(mine, plain)}" if size else "it follows the losses"
    if rates.mark == "FAIL" and (size or plain.facts.rate_by_loss):
        return dataclasses.replace(rates, mark="ABSTAIN", why=why)
    return rates


_EXACT = dict.fromkeys(QUANTITIES, 0.0)


def describe_answers(judged: Verdict, group: Group, left: str = "") -> list[str]:
    """Two lines for the first screen.

    Args:
        judged: the verdict of a number of processes.
        group: what it was compared with.
        left: why one process could not be given its rows; empty if it could, or need not.
    """
    rows = next((one for one in judged.invariants if one.quantity == ROWS), None)
    if judged.fault or not judged.compared:
        return []
    compared = dataclasses.replace(judged, invariants=[one for one in judged.invariants if one is not rows])
    same = "on the rows that they read" if group.plan else "on the rows of one process"
    how = f" (given to one process {group.plan.how})" if group.plan else ""
    lines = [f"{judged.case}: do they compute what one computes, {same}{how}? {compared.mark}"]
    if rows is not None:
        said = rows.worst.name if rows.mark == "FAIL" else rows.why
        answer = {"PASS": "No, and that is no fault", "FAIL": "FAIL", "ABSTAIN": "ABSTAIN"}[rows.mark]
        lines.append(f"{judged.case}: do they read what one reads? {answer}: {said}")
    elif left:
        lines.append(f"{judged.case}: do they read what one reads? No, and their rows were not given to one: {left}")
    return lines
