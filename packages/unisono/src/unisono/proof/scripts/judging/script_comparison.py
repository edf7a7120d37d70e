"""The proof for training scripts that are not ours: one process and many run the same function, and are compared.

A script or function is run in fresh processes: once on one process, once more with its initial weights changed in their
last bit, which measures what rounding comes to, and once for every other number of processes.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from unisono.launch.processes import local_processes
from unisono.launch.processes.children import ChildProcesses
from unisono.launch.resolving.layout import threads_per_process
from unisono.proof import comparison, judgement, report, verdict
from unisono.proof.cases import EPSILON, Case
from unisono.proof.comparison import ComparedQuantity, Difference, Mark
from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.hangs import StateSamples, find_computing, read_stacks
from unisono.proof.recording.trace import QUANTITIES, Array, trace_folder
from unisono.proof.scripts.judging.script_remedies import reword
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.recording.rank_progress import UnequalUpdatesError, describe_ended, describe_waiting
from unisono.proof.scripts.recording.script_process import GONE, ScriptRun
from unisono.proof.scripts.replay.rows_read import ROWS
from unisono.proof.scripts.start.gpu_need import name_kernels
from unisono.proof.scripts.start.launch_variables import launch_variables, wants_fabric
from unisono.proof.scripts.start.script_arguments import name_run
from unisono.proof.verdict import Verdict
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, RunError
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

# What rounding may come to. Beyond it, two runs on one process are not the same run.
MAX_ROUNDING = {"fp64": 1e-6, "fp32": 1e-2}
LATE = "it did not finish within"  # how the error of a run begins that took too long
_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_MIXED_PRECISION = re.compile(r"(?=.*\b(?:float|float32)\b)(?=.*\b(?:double|float64)\b)", re.IGNORECASE | re.DOTALL)


class SlowRunError(local_processes.WorkerError):
    """A run that did not finish, and of which nothing shows that it would not have."""


@dataclass
class Report:
    """What a comparison came to.

    Attributes:
        verdicts: of every number of processes, against one process.
        alone: of one process, for itself.
        certificate: the file with everything, if a folder for it was given.
        unseen: what could not be seen, in sentences.
        answers: of every number of processes, to the two questions of a script: do many compute what one computes, and
            do they read what one reads?
    """

    verdicts: list[Verdict]
    alone: list[Verdict]
    certificate: Path | None = None
    unseen: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Diagnoses with what to do about them in a script."""
        for judged in [*self.verdicts, *self.alone]:
            judged.diagnosis = judged.diagnosis and reword(judged.diagnosis)

    @property
    def exit_code(self) -> int:
        """0: gradients are equal and nothing failed; 1: something failed; 2: nothing could be said."""
        return verdict.EXIT_CODES[self.mark]

    @property
    def mark(self) -> Mark:
        """PASS, FAIL or ABSTAIN; no PASS where no gradients were shown to be equal."""
        mark = verdict.join_marks([*self.verdicts, *self.alone])
        if mark == "PASS" and any(c.quantity == ROWS for v in self.verdicts for c in v.abstained):
            return "ABSTAIN"
        shown = [c.mark for v in self.verdicts for c in v.compared if c.quantity == "raw gradients"]
        return "ABSTAIN" if mark == "PASS" and "PASS" not in shown else mark

    @property
    def lines(self) -> list[str]:
        """The table, what explains it, and the verdict."""
        headline, *rest = report.format_verdicts(self.verdicts, self.alone, mark=self.mark)
        return [headline, *self.answers, *rest, *self.unseen, self.mark]


@dataclass
class ScriptRuns:
    """The runs of a script: on one process, once more with weights changed in their last bit, and on many.

    Attributes:
        run: what they have in common.
        arguments: of the script's command line, for one process and for every other number.
        root: a folder for the traces.
        quiet: print no progress.
        variables: of the script's environment, likewise.
        traces: of the runs that came to their end, by case.
        ended: the errors of the others.
        changes: of what the runs have in common, by case.
        left: by case, why one process could not be given the rows of its ranks.
        own_numbers: cases whose ranks number the rows of data sets of their own.
    """

    run: ScriptRun
    arguments: Mapping[int, list[str]]
    root: Path
    quiet: bool
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    traces: dict[str, ScriptTrace] = field(default_factory=dict)
    ended: dict[str, local_processes.WorkerError] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    own_numbers: set[str] = field(default_factory=set)

    @cached_property
    def cases(self) -> list[Case]:
        """One process, one process perturbed, and the others."""
        precision = self.run.precision
        one = Case("1 process", 1, {}, precision)
        again = Case("1 process, perturbed", 1, {}, precision, perturbed=EPSILON[precision])
        several = (world for world in self.arguments if world > 1)
        return [one, again, *(Case(f"{world} processes", world, {}, precision, one.name) for world in several)]

    def record(self, case: Case, starts: int = 3) -> ScriptTrace | None:
        """Run a case; None if it ended with an error.

        Args:
            case: to run.
            starts: how often at most, if another program has taken the port at which the script's processes meet
                between its choice and their start.
        """
        if not self.quiet:
            say(f"{case.name} …", error=True)
        start = f"{self.run.precision}-{case.name}-{self.run.by_fabric:d}".replace(",", "").replace(" ", "-")
        arguments = name_run(self.arguments[case.world_size], f"{self.root.name}-{start}")
        variables = dict(self.variables.get(case.world_size, {}))
        run = replace(self.run, arguments=arguments, variables=variables, **self.changes.get(case.name, {}))
        try:
            trace = run_case(case, run, self.root, threads_per_process(max(self.arguments)))
            if (reference := self.traces.get(case.reference)) is not None and case.world_size > 1:
                trace.facts.per_process = find_local_statistics(trace, reference)
            self.traces[case.name] = trace
        except local_processes.WorkerError as error:
            if wants_fabric(error) and not self.run.by_fabric:
                self.run = replace(self.run, by_fabric=True)
                return self.record(case)
            if is_port_taken(error) and starts > 1:
                return self.record(case, starts - 1)
            self.ended[case.name] = error
        return self.traces.get(case.name)

    def refuse_unrunnable(self) -> NoReturn:
        """Say that there is nothing to compare with.

        Raises:
            RunError: always, with the error of the run on one process.
        """
        error = self.ended[self.cases[0].name]
        kernels = name_kernels(error)
        why = f" ({kernels})" if kernels else ""
        raise RunError(f"the script fails on one process, so nothing was compared{why}:\n{error}")

    def explain_stray(self, adaptive: bool, pair: Sequence[Case] = ()) -> str:
        """Why the script is not the same when it is run twice on one process; empty if it is."""
        one, again = pair or self.cases[:2]
        if again.name in self.ended:
            return str(self.ended[again.name])
        return _explain_unrepeatable(self.traces[again.name], self.traces[one.name], adaptive)

    def judge(self, adaptive: bool, cases: Sequence[Case] = ()) -> tuple[list[Verdict], list[Verdict]]:
        """Compare the runs on many processes with that on one; their verdicts, and those of single runs."""
        verdicts, alone = judgement.judge_cases([*cases] or self.cases, self.traces, adaptive, self.ended)
        for judged in verdicts:
            if isinstance(error := self.ended.get(judged.case), SlowRunError):
                judged.fault, judged.diagnosis = "", None
                judged.compared = [ComparedQuantity("the run", "ABSTAIN", why=str(error))]
        return verdicts, alone


def is_port_taken(error: local_processes.WorkerError) -> bool:
    """Whether a run ended since its processes could not meet at a port, which another program has."""
    return bool(_PORT_TAKEN.search(str(error)))


def find_local_statistics(mine: ScriptTrace, reference: ScriptTrace, until: int | None = None) -> list[str]:
    """Of the buffers in `per_process`, those of layers whose statistics really are of the rows of one process.

    The class of a layer does not say it: one that is derived from torch's may reduce its statistics by itself. Where
    ranks differ for the first time, in the first `until` steps, rank 0's must not be those of one process either.
    """
    for step, seen in enumerate(mine.ranks[:until] if mine.facts.per_process else []):
        if any(rank.buffers != seen[0].buffers for rank in seen[1:]):
            layers = {name.rpartition(".")[0] for name in _find_far_buffers(mine, reference, step)}
            return [name for name in mine.facts.per_process if name.rpartition(".")[0] in layers]
    return []


def find_other_buffers(mine: ScriptTrace, reference: ScriptTrace) -> list[str]:
    """Buffers that rank 0 begins with other values of than one process does, and by more than rounding."""
    ours, theirs = mine.ranks[0][0].initial, reference.ranks[0][0].initial
    far = _find_far_buffers(mine, reference, 0)
    return [name for name in ours if name in far and ours[name] != theirs.get(name, ours[name])]


def find_unmoved(mine: ScriptTrace, reference: ScriptTrace, since: int) -> list[str]:
    """The parameters that one process trains, and that many leave as they began in every step that was recorded.

    A rank may get some from others after its own update, so one step shows nothing.

    Args:
        mine: of several processes.
        reference: of one.
        since: the step, from 1, that differs first: what one process trains after it may follow from another cause.
    """
    steps = range(min(len(mine.facts.steps), len(reference.facts.steps)))
    begun = mine.tensors("initial parameters", None)
    ours = [mine.tensors("parameters", step) for step in steps]
    theirs = [reference.tensors("parameters", step) for step in steps[:since]]
    still = [name for name in begun if all(np.array_equal(one.get(name, []), begun[name]) for one in ours)]
    moved = [n for n in still if any(n in one and not np.array_equal(one[n], begun[n]) for one in theirs)]
    return moved if len(steps) > 1 else []


def _find_far_buffers(mine: ScriptTrace, reference: ScriptTrace, step: int) -> set[str]:
    apart = comparison.relative_distances(mine.tensors("buffers", step), reference.tensors("buffers", step))
    return {name for name, size in apart.items() if size > MAX_ROUNDING[mine.precision]}


def have_same_copies(mine: ScriptTrace, reference: ScriptTrace) -> bool:
    """Whether both runs have the same copies of the model (moving averages, teachers)."""
    steps = range(min(len(mine.facts.steps), len(reference.facts.steps)))
    return all({*mine.tensors("EMA", step)} == {*reference.tensors("EMA", step)} for step in steps)


def differ_in_order_alone(mine: ScriptTrace, reference: ScriptTrace, allowed: float) -> bool:
    """Whether all buffers that differ have the same rows in another order: a queue that is filled rank by rank.

    Args:
        mine: of several processes.
        reference: of one.
        allowed: relative difference that is rounding.
    """
    found = False
    for step in range(min(len(mine.facts.steps), len(reference.facts.steps))):
        ours, theirs = mine.tensors("buffers", step), reference.tensors("buffers", step)
        for name, size in comparison.relative_distances(ours, theirs).items():
            if size <= allowed:
                continue
            a, b = ours.get(name), theirs.get(name)
            if a is None or b is None or a.shape != b.shape or a.ndim < 1:
                return False
            if comparison.relative_distances({name: _sort_rows(a)}, {name: _sort_rows(b)})[name] > allowed:
                return False
            found = True
    return found


def _sort_rows(values: Array) -> Array:
    """The rows of an array, in an order of their own; equal but for rounding, they come in the same order."""
    rows = values.reshape(len(values), -1)
    first = np.round(rows.astype(np.float64), 5)
    return np.asarray(rows[np.lexsort(first.T[::-1])] if rows.size else rows)


def name_local_statistics(
    verdicts: Sequence[Verdict], traces: Mapping[str, ScriptTrace], reference: ScriptTrace
) -> None:
    """Name batch normalisation by the rows of one process, where it is what makes the difference."""
    for found in verdicts:
        if found.first is None or found.case not in traces or found.first.quantity not in ("loss", "raw gradients"):
            continue
        if any(c.mark == "FAIL" and c.worst.step == found.first.worst.step for c in found.invariants):
            continue  # a fault that the run shows by itself, whatever its layers normalise by
        if names := find_local_statistics(traces[found.case], reference, found.first.worst.step):
            statistics = [name for name in names if not name.endswith("num_batches_tracked")] or names
            message = f"batch normalisation by the rows of one process ({join_names(statistics)}), not SyncBatchNorm"
            found.diagnosis = build_diagnosis(FaultName.LOCAL_BUFFERS, message)


def run_case(case: Case, run: ScriptRun, root: Path, threads: int) -> ScriptTrace:
    """Run a case to its end.

    Raises:
        ConfigError: for a mistake in the use of the recorder.
        WorkerError: for an error of the script, or if it took too long.
    """
    trace = trace_folder(root, case.name)
    shutil.rmtree(trace, ignore_errors=True)
    trace.mkdir()
    own = replace(run, trace=trace.name, perturbed=case.perturbed)
    (root / "run.json").write_text(json.dumps(asdict(own)), encoding="utf-8")
    started: list[ChildProcesses] = []
    states = StateSamples(started)
    try:
        module, world = "unisono.proof.scripts.recording.script_process", case.world_size
        with launch_variables(world, run.variables, by_fabric=run.by_fabric), states.sampled():
            local_processes.run_processes(
                module, root, world, threads, run.reference, loopback=True, shares_port=False, started=started
            )
    except local_processes.WorkerError as error:
        raise _interpret_error(error, run, trace, world, states) from None
    return ScriptTrace(trace, case.precision)


def _interpret_error(
    error: local_processes.WorkerError, run: ScriptRun, trace: Path, world: int, states: StateSamples
) -> ConfigError | local_processes.WorkerError:
    message, fault = str(error), error.fault
    if error.exit_code == ConfigError.exit_code:
        return ConfigError(message)
    if late := read_stacks(trace.parent, world):
        lines = "; ".join(f"rank {rank} was at {line}" for rank, line in late.items())
        message = f"{LATE} {run.timeout:g} s (timeout={run.timeout:g}): {lines}"
        on_cpu = run.cuda == "cpu" or not torch.cuda.is_available()  # one that waits for its GPU runs, too
        if world > 1 and on_cpu and (computing := find_computing(trace.parent, states.find_running())):
            return SlowRunError(
                f"{message}; ranks {computing} were not waiting for others but running, or ready to: give it more time "
                "(timeout=…) or a host that is less busy, if it is not in a loop without an end",
                error.exit_code,
            )
        if waiting := describe_waiting(trace, world):
            return ConfigError(f"{message}{waiting} One that is made on some ranks only cannot be recorded")
        fault = FaultName.DEADLOCK if world > 1 else ""
    elif not fault and GONE.search(message):
        ended = describe_ended(trace, world)
        message = f"{message}; {ended or 'another process is gone'}"
        fault = UnequalUpdatesError.fault if ended else FaultName.ERROR
    elif run.precision == "fp64" and _MIXED_PRECISION.search(message):
        fault = FaultName.MIXED_PRECISIONS
    return local_processes.WorkerError(message, error.exit_code, fault=fault)


def drop_unrepeatable_reports(
    traces: Mapping[str, ScriptTrace], again: ScriptTrace, reference: ScriptTrace
) -> list[str]:
    """Forget reported numbers in which two runs on one process differ, as times do; returns their names."""

    def reports(trace: ScriptTrace) -> list[list[dict[str, float]]]:
        return [*(step.metrics for step in trace.facts.steps), trace.facts.evaluation]

    pairs = [(a[0], b[0]) for a, b in zip(reports(again), reports(reference), strict=False) if a and b]
    names = {
        name
        for ours, theirs in pairs
        for name in {*ours} & {*theirs}
        if not predictions.is_equal(ours[name], theirs[name], MAX_ROUNDING[reference.precision])
    }
    for values in (values for trace in traces.values() for each in reports(trace) for values in each):
        for name in names & {*values}:
            del values[name]
    return sorted(names)


def _explain_unrepeatable(again: ScriptTrace, reference: ScriptTrace, adaptive: bool) -> str:
    """Why two runs on one process, of which one began with weights changed in their last bit, are not the same run."""
    allowed = {**dict.fromkeys(QUANTITIES, math.inf), "sample ids": 0.0}
    found = {c.quantity: c for c in comparison.compare_traces(again, reference, allowed, adaptive=False)}
    if adaptive:  # what it makes of rounding is told from the rest by the floor of the gradients
        allowed["raw gradients"] = judgement.FLOOR[reference.precision]
        compared = comparison.compare_traces(again, reference, allowed, adaptive=True)
        found |= {c.quantity: c for c in compared if c.quantity in ("optimizer state", "parameters", "EMA")}
    for quantity in QUANTITIES:
        worst = found[quantity].worst
        if found[quantity].mark == "FAIL" or worst.size > MAX_ROUNDING[reference.precision]:
            return (
                "the script does not repeat, or amplifies rounding: two runs on one process, whose initial weights "
                f"differ in their last bit, differ in {quantity}{_format_distance(worst)}; give every generator a seed "
                "(torch.manual_seed), and let no order follow hash(), as that of a set does"
            )
    return ""


def _format_distance(worst: Difference) -> str:
    step = f" at step {worst.step}" if worst.step else ""
    return step if math.isinf(worst.size) else f" by {worst.size:.0e}{step}"
