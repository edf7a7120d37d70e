"""Checks that a run consumed each planned sample exactly once, by comparing its ledger with the plan.

The plan is rebuilt from the run's configuration. The ledger lines of all processes must cover every step with the
planned samples, without gaps or overlaps. Steps repeated after an interruption must contain the same samples. A few
steps are rebuilt, to check that the data have not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from unisono.config import CONFIG_FILE
from unisono.data import ledger
from unisono.data.ledger import LedgerLine, RunStart
from unisono.data.loading import checksum
from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.order.plan import Plan, SampleIndices
from unisono.data.order.planning import build_plan, build_source
from unisono.runtime.errors import BadSamplesError, RunError, UnisonoError, format_stretches
from unisono.runtime.rng import key
from unisono.task import Source, Task
from unisono.task_config import build_task, read_run

_COLLATE_SAMPLES = 64  # samples collated at a time
_MAX_SHOWN = 20  # faults listed


@dataclass
class AuditReport:
    """The result of an audit.

    Attributes:
        folder: the run directory.
        steps: number of steps that count towards the run.
        samples: number of samples consumed in them.
        masked: samples that could not be built: (step, row of the source, reason).
        starts: (first step, number of processes) of each start of the run.
        repeated: number of ledger lines of repeated steps with the same samples.
        rebuilt: number of steps that were rebuilt with the same result.
        faults: what is wrong; empty if every sample was consumed exactly once.
    """

    folder: Path
    steps: int = 0
    samples: int = 0
    masked: list[tuple[int, int, str]] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)
    repeated: int = 0
    rebuilt: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether there are no faults."""
        return not self.faults

    def __str__(self) -> str:
        starts = ", ".join(f"step {first} on {world}" for first, world in self.starts)
        lines = [
            f"{self.folder}: {self.steps} steps, {self.samples} samples, started from {starts or 'nowhere'}",
            f"  repeated after an interruption with the same samples: {self.repeated} lines; rebuilt: {self.rebuilt} "
            "steps",
        ]
        lines += [f"  step {step}: row {row} left out: {why}" for step, row, why in self.masked[:_MAX_SHOWN]]
        if len(self.masked) > _MAX_SHOWN:
            lines.append(f"  {len(self.masked)} samples left out in all")
        lines += [f"  FAULT: {fault}" for fault in self.faults[:_MAX_SHOWN]]
        if len(self.faults) > _MAX_SHOWN:
            lines.append(f"  {len(self.faults)} faults in all")
        verdict = (
            "every sample of the plan was consumed exactly once" if self.is_clean else "the run differs from the plan"
        )
        return "\n".join([*lines, f"{'PASS' if self.is_clean else 'FAIL'}: {verdict}"])


def audit(folder: Path, remake: int = 2, *, task: str | type[Task] | None = None, trust: bool = False) -> AuditReport:
    """Audit a run.

    Args:
        folder: the run directory.
        remake: number of steps to rebuild and compare.
        task: of the run, as for `unisono.task_config.read_run`.
        trust: import the task that the run names, from any location.

    Raises:
        TrustError: if the run names a task that is not trusted.
        RunError: if the folder is not a run directory, or has no ledger.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder} is not a run directory (no config.yaml)")
    files = ledger.find_files(folder)
    if not files:
        raise RunError(f"{folder} has no ledger (no {ledger.FOLDER}/rank-00000.jsonl), so there is nothing to audit")
    config = read_run(folder, task, trust=trust)
    run_task = build_task(config)
    source = build_source(run_task, config)
    plan = build_plan(run_task, source, config, world_size=1)  # the order is the same for any number of processes
    report = AuditReport(folder)
    starts = collect_starts(files, report)
    saved = [_step_of(path.parent.name) for path in folder.glob("checkpoints/step-*/manifest.json")]
    counted = check_starts(starts, plan, max(saved, default=0), report)
    rebuild_steps(counted, plan, run_task, source, remake, report)
    return report


def _step_of(name: str) -> int:
    number = name.removeprefix("step-")
    return int(number) if number.isdecimal() and len(number) <= 18 else 0


def collect_starts(files: Sequence[Path], report: AuditReport) -> list[RunStart]:
    """The starts of a run, in order, with the lines of all its processes."""
    read = {ledger.rank_of(path): ledger.read_ledger(path) for path in files}
    for _, faults in read.values():
        report.faults += faults
    if 0 not in read:
        report.faults.append("the ledger of rank 0 is missing")
        return []
    starts = {start.name: start for start in read[0][0]}
    for rank, (theirs, _) in read.items():
        for start in theirs:
            known = starts.get(start.name)
            if known is None or (known.first, known.world_size) != (start.first, start.world_size):
                report.faults.append(f"rank {rank} has a start from step {start.first} that rank 0 does not have")
            else:
                known.lines[rank] = start.lines[rank]
    report.starts = [(start.first, start.world_size) for start in starts.values()]
    return list(starts.values())


def check_starts(
    starts: Sequence[RunStart], plan: Plan, checkpoint: int, report: AuditReport
) -> dict[int, list[LedgerLine]]:
    """Compare the ledger lines of a run with its plan.

    Args:
        starts: of the run, in order.
        plan: of the run.
        checkpoint: number of steps in its newest checkpoint.
        report: results are added to it.

    Returns:
        The lines of each step that counts towards the run.
    """
    counted: dict[int, list[LedgerLine]] = {}
    again: dict[int, list[list[LedgerLine]]] = {}
    for number, start in enumerate(starts):
        ranks = [rank for rank in sorted(start.lines) if rank < start.world_size]
        absent = _gaps([-1, *ranks, start.world_size])
        if absent:
            report.faults.append(f"the start from step {start.first} has no ledger of ranks {format_stretches(absent)}")
        until = min((later.first for later in starts[number + 1 :]), default=None)
        if until is None:  # interrupted: steps that not every process has recorded will be repeated on resume
            ends = [start.first] if absent else [_last_step(start, rank) for rank in ranks]
            until = max(checkpoint, min(ends, default=0))
        by_step: dict[int, list[LedgerLine]] = {}
        for line in (line for lines in start.lines.values() for line in lines):
            by_step.setdefault(line.step, []).append(line)
        recorded = [step for step in sorted(by_step) if start.first <= step < until]
        for first, last in _gaps([start.first - 1, *recorded, until]):  # a forged ledger may claim any number of steps
            shown = min(last, first + _MAX_SHOWN - 1)
            counted |= {step: [] for step in range(first, shown + 1)}
            if shown < last:
                report.faults.append(f"steps {shown + 1} to {last} have no lines")
        counted |= {step: by_step.pop(step) for step in recorded}
        for step, lines in by_step.items():
            again.setdefault(step, []).append(lines)
    for step in sorted(counted.keys() | again.keys()):
        if step >= plan.steps:
            report.faults.append(f"step {step} is not one of the {plan.steps} of the plan")
            continue
        planned = plan.samples(step, range(plan.rows(step)))
        if step in counted:
            _check_coverage(step, counted[step], plan.rows(step), report)
        for lines in (counted.get(step, []), *again.get(step, [])):
            _check_samples(step, lines, planned, report)
        for lines in again.get(step, []):
            _check_repeats(step, lines, counted.get(step), plan.rows(step), report)
    if missing := _gaps([-1, *sorted(counted)]):
        report.faults.append(f"steps {format_stretches(missing)} are missing")
    report.steps = len(counted)
    report.samples = sum(line.samples for lines in counted.values() for line in lines)
    report.masked = [
        (step, row, why)
        for step, lines in sorted(counted.items())
        for line in lines
        for _, row, _, _, why in line.masked
    ]
    return counted


def rebuild_steps(
    counted: Mapping[int, Sequence[LedgerLine]],
    plan: Plan,
    task: Task,
    source: Source,
    remake: int,
    report: AuditReport,
) -> None:
    """Rebuild a few steps, chosen by the seed, and compare their content with the ledger."""
    steps = sorted(counted)
    chosen = sorted({steps[key(plan.seed, "audit", turn) % len(steps)] for turn in range(remake if steps else 0)})
    builder = BatchBuilder(task, source, plan.seed, "train", mask=True, contents=True)
    for step in chosen:
        try:
            good, pieces, _ = builder.pieces(plan.samples(step, range(plan.rows(step))))
            if plan.capacity is None:
                good, pieces = _drop_unusable(task, good, pieces)
        except UnisonoError as error:
            report.faults.append(f"step {step} cannot be rebuilt: {error}")
            continue
        contents = np.array(checksum.checksums(pieces), dtype=np.uint64)
        if ledger.digest_contents(good, contents) != _sum_content(counted[step]):
            report.faults.append(
                f"step {step}: its rows now differ from those that were trained on: the data or the task "
                "have changed, or sample() does not depend on its arguments alone"
            )
        else:
            report.rebuilt += 1


def _drop_unusable(task: Task, taken: SampleIndices, pieces: Sequence[Any]) -> tuple[SampleIndices, Sequence[Any]]:
    """The samples without those that `collate` rejects."""
    good = np.ones(len(pieces), dtype=bool)
    for first in range(0, len(pieces), _COLLATE_SAMPLES):
        try:
            task.collate(pieces[first : first + _COLLATE_SAMPLES])
        except BadSamplesError as error:
            good[[first + number for number in error.reasons]] = False
    return taken[good], [piece for piece, fine in zip(pieces, good, strict=True) if fine]


def _gaps(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last number of each stretch that is left out between ascending numbers."""
    return [(before + 1, after - 1) for before, after in pairwise(numbers) if after - before > 1]


def _last_step(start: RunStart, rank: int) -> int:
    """One past the last step that a rank has recorded."""
    return max((line.step + 1 for line in start.lines.get(rank, ())), default=start.first)


def _check_coverage(step: int, lines: Sequence[LedgerLine], rows: int, report: AuditReport) -> None:
    """Check that every row of the global batch occurs exactly once."""
    reached = 0
    for line in sorted((line for line in lines if len(line.rows)), key=lambda line: line.rows.start):
        if line.rows.start > reached:
            report.faults.append(f"step {step}: no process built rows {reached} to {line.rows.start - 1}")
        if line.rows.start < reached:
            report.faults.append(f"step {step}: rows {line.rows.start} to {reached - 1} were built twice")
        reached = max(reached, line.rows.stop)
    if reached < rows:
        report.faults.append(f"step {step}: no process built rows {reached} to {rows - 1}")
    if reached > rows:
        report.faults.append(f"step {step}: rows {rows} to {reached - 1} were built but are not in the plan")


def _check_samples(step: int, lines: Sequence[LedgerLine], planned: SampleIndices, report: AuditReport) -> None:
    for line in lines:
        here = planned[(planned.slots >= line.rows.start) & (planned.slots < line.rows.stop)]
        masked = {place[:4] for place in line.masked}
        good = here[np.array([place[:4] not in masked for place in here], dtype=bool)]
        if (
            len(here) - len(good) != len(line.masked)
            or ledger.digest_ids([good]) != line.ids
            or len(good) != line.samples
        ):
            report.faults.append(
                f"step {step}: rank {line.rank} built samples in rows {line.rows.start} to {line.rows.stop - 1} "
                "that differ from the plan"
            )


def _check_repeats(
    step: int, lines: Sequence[LedgerLine], later: Sequence[LedgerLine] | None, rows: int, report: AuditReport
) -> None:
    """Check that repeated steps had the same content: by whole batch if both are complete, else by equal row ranges."""
    if not later:
        return
    if all(sum(len(line.rows) for line in part) == rows for part in (lines, later)):
        fine = _sum_content(lines) == _sum_content(later)
        report.repeated += len(lines) if fine else 0
        if not fine:
            report.faults.append(f"step {step} contained other samples when it was repeated after an interruption")
        return
    for line in lines:
        for other in (other for other in later if other.rows == line.rows):
            report.repeated += other.content == line.content
            if other.content != line.content:
                report.faults.append(
                    f"step {step}: rows {line.rows.start} to {line.rows.stop - 1} contained other samples when they "
                    "were repeated after an interruption"
                )


def _sum_content(lines: Sequence[LedgerLine]) -> int:
    return sum(line.content for line in lines) % (1 << 64)
