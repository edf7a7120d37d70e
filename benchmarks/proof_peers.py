"""The faults of `tests/proofs/zoo` under Unisono's proof, TrainParity, and torchtitan's rule for comparing losses.

    pip install --no-deps trainparity
    python -m benchmarks.proof_peers [--write] [--runs DIR]

TrainParity gets what its interface takes; see `proof_peers_cases.py`. Of torchtitan the rule of its script
`scripts/loss_compare.py` is applied to our runs, not the script, which starts torchtitan's own trainer with its own
models: losses of all steps, rounded to 32 bits as TensorBoard keeps them, must be equal, or, by the looser rule that
torchtitan's own tests use where sums are made in another order, within 1e-4 relative. The peers see runs without the
guards of Unisono's engine, which would end some of them before there is a loss. All of it takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import page
from benchmarks import proof_peers_cases as cases
from benchmarks.proof_peers_cases import Outcome
from packages.unisono.tests import processes
from tests.proofs.zoo import zoo
from tests.proofs.zoo.making import FAULTS, TASKS, Fault, nothing
from unisono.engines.torch.guards import replicas
from unisono.proof import comparison
from unisono.proof.cases import Case
from unisono.proof.judgement import FLOOR
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.proof.verdict import Verdict
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

TORCHTITAN = "0.3.0"  # the release whose rule this is

# What an entry can be, the most telling first.
NAMES, SEES, ABSTAINS, TWIN = "names", "sees, does not name", "abstains", "also on the clean twin"
MISSED, OUT, ABSENT = "missed", "out of scope", "ABSTAIN: not installed"
ENTRIES = (NAMES, SEES, ABSTAINS, TWIN, MISSED, OUT, ABSENT)

# What TrainParity points at -> what our diagnosis calls the fault that this amounts to naming.
POINTED = {
    "cross_rank_overlap": ("Every rank reads the same rows", "Rows are repeated"),
    "same_rank_duplicate": ("Rows are repeated", "Data are replayed"),
    "missing_id": ("Rows are dropped",),
    "data.rows": ("Data are replayed",),
    "data.learning_rate": ("The schedule is stepped", "The learning rate differs"),
    "optimizer": ("The state of the optimizer was lost",),
    "loss_accounting": ("A mean of means",),
}


@dataclass(frozen=True)
class Mode:
    """How the peers' runs are made.

    Attributes:
        precision: of the run.
        resumed: whether it is interrupted and resumed; None: as the fault says.
        steps: of the run.
    """

    precision: str = "fp64"
    resumed: bool | None = None
    steps: int = zoo.PROOF.steps


MODES = {
    "fp64": Mode(),
    "fp32": Mode("fp32"),
    "whole": Mode(resumed=False),
    "whole-again": Mode(resumed=False),
    "resumed": Mode(resumed=True),
    "long": Mode("fp32", steps=50),  # of the clean twins only: when do sums in another order show in a loss?
}


@dataclass(frozen=True)
class Check:
    """One check of a tool, on a run with a fault and on its clean twin.

    Attributes:
        fault: outcome on the run with the fault.
        clean: outcome on the clean twin; PASS where there is none.
        detail: what the tool points at, for the table.
        named: whether that is the fault.
        in_scope: whether the tool says that it looks for such a thing.
    """

    fault: str
    clean: str
    detail: str = ""
    named: bool = False
    in_scope: bool = True

    @property
    def entry(self) -> str:
        """One of `ENTRIES`."""
        if self.fault == "PASS":
            return MISSED if self.in_scope else OUT
        if self.clean != "PASS":
            return TWIN
        if self.fault != "FAIL":
            return ABSTAINS
        return NAMES if self.named else SEES


def best(checks: Iterable[Check]) -> Check:
    """The check of a tool that tells most."""
    return min(checks, key=lambda check: ENTRIES.index(check.entry))


# Unisono ----------------------------------------------------------------------------------------------------------


def unisono(name: str, verdicts: Mapping[str, Verdict]) -> Check:
    fault, verdict = FAULTS[name], verdicts[name]
    called = verdict.diagnosis.fault if verdict.diagnosis else ""
    pointer = verdict.first.quantity if verdict.first else ""
    clean = zoo.mark_of(verdicts[zoo.name_of(fault)]) if has_twin(fault) else "PASS"
    return Check(zoo.mark_of(verdict), clean, pointer, bool(fault.named) and fault.named in called)


def has_twin(fault: Fault) -> bool:
    """Whether anything was changed in the run; else the task is the fault."""
    return fault.made is not nothing


# torchtitan's rule ------------------------------------------------------------------------------------------------


def losses_differ(mine: Sequence[float], reference: Sequence[float], close: bool = False) -> str:
    """Where the losses of two runs differ by torchtitan's rule; empty if they do not.

    Args:
        mine: loss of each step.
        reference: the same of the other run.
        close: whether within 1e-4 relative or 1e-5 absolute is allowed.
    """
    if len(mine) != len(reference):
        return "number of steps"
    for step, pair in enumerate(zip(mine, reference, strict=True), 1):
        a, b = (float(np.float32(loss)) for loss in pair)
        if not (math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) if close else a == b):
            return f"step {step}"
    return ""


def torchtitan(name: str, root: Path, is_trained_otherwise: bool) -> Check:
    fault = FAULTS[name]
    mine, clean = (losses(trace(root, n)) for n in (name, zoo.name_of(fault)))
    checks = []
    for close in (False, True):
        difference = losses_differ(mine, alone(root, fault), close)
        twin = losses_differ(clean, alone(root, fault), close) if has_twin(fault) else ""
        outcome, other = ("FAIL" if differs else "PASS" for differs in (difference, twin))
        checks.append(Check(outcome, other, difference, in_scope=is_trained_otherwise))
    return best(checks)


def losses(of: Trace) -> list[float]:
    return [step.loss for step in of.facts.steps]


def trained_otherwise(name: str, root: Path) -> bool:
    """Whether a fault changes the training at all, and not only what is reported of it or evaluated after it."""
    mine, clean = trace(root, name), trace(root, zoo.name_of(FAULTS[name]))
    if len(mine.facts.steps) != len(clean.facts.steps):
        return True
    last = len(clean.facts.steps) - 1
    apart = comparison.relative_distances(mine.tensors("parameters", last), clean.tensors("parameters", last))
    return bool(losses_differ(losses(mine), losses(clean))) or any(d > FLOOR["fp64"] for d in apart.values())


# TrainParity ------------------------------------------------------------------------------------------------------


def trainparity(name: str, roots: Mapping[str, Path], resumed: Mapping[str, Outcome]) -> Check:
    """Its checks, and the one of them that tells most.

    Args:
        name: of the fault.
        roots: folders of the runs, by mode.
        resumed: what its resume check says of every run.
    """
    fault = FAULTS[name]
    twin = zoo.name_of(fault)
    size = len(TASKS[fault.task]().data())
    mine, clean, single = (trace(roots["fp64"], n) for n in (name, twin, f"single {fault.task}"))

    def audited(run: str) -> Outcome:
        return cases.audited(mine if run == name else clean, single, size)

    def check(title: str, verdict_of: Callable[[str], Outcome], in_scope: bool) -> Check:
        return judged(
            title, verdict_of(name), verdict_of(twin) if has_twin(fault) else Outcome("PASS"), fault, in_scope
        )

    checks = [
        check("sample ids", audited, cases.ids(mine, size) != cases.ids(clean, size)),
        check("resume", resumed.__getitem__, bool(fault.resumed)),
    ]
    if cases.is_reached(name):
        checks.append(check("accumulation", cases.accumulated, True))
    return best(checks)


def beyond(name: str, root: Path, is_trained_otherwise: bool) -> Check:
    """What it would say if its resume check were told that one process is the whole run, and two are the resumed."""
    fault = FAULTS[name]
    single = trace(root, f"single {fault.task}")
    clean = cases.across(trace(root, zoo.name_of(fault)), single) if has_twin(fault) else Outcome("PASS")
    return judged("at the end", cases.across(trace(root, name), single), clean, fault, is_trained_otherwise)


def judged(title: str, verdict: Outcome, clean: Outcome, fault: Fault, in_scope: bool) -> Check:
    """What a check of TrainParity comes to."""
    pointer = next((key for key in POINTED if verdict.first.startswith(key)), "")
    named = any(words in fault.named for words in POINTED.get(pointer, ()))
    shown = verdict.first.partition("[")[0] or verdict.outcome
    return Check(verdict.outcome, clean.outcome, f"{title}: {shown}", named, in_scope)


def resumes(roots: Mapping[str, Path]) -> dict[str, Outcome]:
    """What TrainParity's resume check says of every run; it mostly waits for processes that import torch."""
    names = [*zoo.CLEAN, *FAULTS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda name: cases.resumed(name, roots), names), strict=True))


# runs -------------------------------------------------------------------------------------------------------------


def run(process: ProcessInfo, group: Communicator, names: list[str], root: Path, mode: str) -> None:
    """Record the runs of one mode, as the zoo does."""
    how = MODES[mode]
    proof = zoo.PROOF.model_copy(update={"steps": how.steps})
    for name in names:
        fault = zoo.RUNS[name]
        if how.resumed is not None:
            fault = replace(fault, resumed=max(1, fault.resumed) if how.resumed else 0)
        single = Case(name, 1, {"micro_batch": 2}, how.precision)
        case = zoo.case_of(name, fault, how.precision) if process.world_size > 1 else single
        with without_guards(), fault.made():
            case_recorder.record_case(TASKS[fault.task](), zoo.configured(case), process, group, case, proof, root)


@contextmanager
def without_guards() -> Iterator[None]:
    """Let a run go on that Unisono's engine would end before its first step."""
    patches = (
        mock.patch.object(replicas, "optimizer_holds", lambda *_: None),
        mock.patch.object(replicas, "digests", lambda _: {}),
        mock.patch.object(replicas, "replicas_that_differ", lambda *_: []),
    )
    with patches[0], patches[1], patches[2]:
        yield


def recorded(root: Path) -> dict[str, Path]:
    """Record the runs of all modes that are not there yet; returns their folders."""
    roots = {mode: root / mode for mode in MODES}
    for mode, folder in roots.items():
        if not folder.exists():
            half = Path(tempfile.mkdtemp(dir=root))
            names = [*zoo.CLEAN] if mode == "long" else [*zoo.CLEAN, *FAULTS]
            processes.alone(run, list(zoo.REFERENCES), half, mode)
            processes.run(run, 2, names, half, mode, timeout=600)
            half.rename(folder)
    return roots


def trace(root: Path, name: str) -> Trace:
    return Trace(trace_folder(root, name))


# the table --------------------------------------------------------------------------------------------------------


def table(columns: Mapping[str, Mapping[str, Check | None]], more: str = "") -> str:
    """Fault × tool, and what each tool comes to in numbers; None stands for a tool that is not there."""
    lines = [f"| fault | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in FAULTS:
        lines.append(f"| {name} | {' | '.join(cell(checks[name]) for checks in columns.values())} |")
    lines += ["", f"Of {len(FAULTS)} faults ({about()}):", ""]
    lines += [f"* {tool}: {summary(list(checks.values()))}" for tool, checks in columns.items()]
    return "\n".join([*lines, *(["", more] if more else [])]) + "\n"


def alarms(roots: Mapping[str, Path]) -> str:
    """How many clean twins torchtitan's rule takes for wrong when they run longer, and what the looser one sees."""
    exact, loose = (where_twins_differ(roots["long"], close) for close in (False, True))
    steps = f", from step {min(exact)} on" if exact else ""
    differences = [
        losses_differ(losses(trace(roots["fp32"], n)), alone(roots["fp32"], f), True) for n, f in FAULTS.items()
    ]
    return (
        f"Over {MODES['long'].steps} steps in fp32, torchtitan's rule of equality fails on {len(exact)} of the "
        f"{len(zoo.CLEAN)} clean twins{steps}, and the looser one on {len(loose)}; alone, the looser one sees "
        f"{sum(map(bool, differences))} faults in fp32."
    )


def where_twins_differ(root: Path, close: bool) -> list[int]:
    """The first step of each clean twin whose loss is not that of one process by torchtitan's rule."""
    pairs = [(losses(trace(root, name)), alone(root, fault)) for name, fault in zoo.CLEAN.items()]
    differences = [losses_differ(*pair, close) for pair in pairs]
    return [int(step.removeprefix("step ")) for step in differences if step]


def alone(root: Path, fault: Fault) -> list[float]:
    """Losses of the run on one process that a fault is compared with."""
    return losses(trace(root, f"single {fault.task}"))


def cell(check: Check | None) -> str:
    if check is None:
        return ABSENT
    return f"{check.entry} ({check.detail})" if check.detail and check.fault != "PASS" else check.entry


def summary(checks: Sequence[Check | None]) -> str:
    """How often each entry stands in a column."""
    counted = Counter(ABSENT if check is None else check.entry for check in checks)
    return ", ".join(f"{counted[entry]} {entry}" for entry in ENTRIES if counted[entry])


def about() -> str:
    own = f"TrainParity {importlib.metadata.version('trainparity')}" if is_installed() else "TrainParity not installed"
    torch = importlib.metadata.version("torch").partition("+")[0]
    return f"torch {torch}, {own}, the rule of torchtitan {TORCHTITAN}; {time.strftime('%Y-%m-%d')}"


def is_installed() -> bool:
    return importlib.util.find_spec("trainparity") is not None


def compared(root: Path) -> str:
    """Run everything; returns the table."""
    with tempfile.TemporaryDirectory() as folder:
        verdicts = zoo.verdicts(Path(folder))
    roots = recorded(root)
    resumed = resumes(roots) if is_installed() else {}
    changed = {name: trained_otherwise(name, roots["fp64"]) for name in FAULTS}
    columns: dict[str, dict[str, Check | None]] = {
        "Unisono": {name: unisono(name, verdicts) for name in FAULTS},
        "TrainParity": {name: trainparity(name, roots, resumed) if resumed else None for name in FAULTS},
    }
    if is_installed():
        columns["TrainParity, one process against two"] = {
            name: beyond(name, roots["fp64"], changed[name]) for name in FAULTS
        }
    for precision in ("fp64", "fp32"):
        rule = {name: torchtitan(name, roots[precision], changed[name]) for name in FAULTS}
        columns[f"torchtitan's rule, {precision}"] = {**rule}
    return table(columns, alarms(roots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/proof.md")
    parser.add_argument("--runs", type=Path, help="keep the peers' runs here, and use those that are there already")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = arguments.runs or Path(folder)
        runs.mkdir(exist_ok=True)
        text = compared(runs)
    print(text)
    if arguments.write:
        page.put("proof_peers", text, "docs/proof.md")


if __name__ == "__main__":
    main()
