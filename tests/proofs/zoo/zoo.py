"""Runs the faults and says what a proof makes of them.

`python -m tests.proofs.zoo.zoo --write` puts the table into the docs.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from packages.unisono.tests import processes
from packages.unisono.tests.runs import SGD, configuration
from tests.proofs.zoo import disguised, faults, state_faults, study  # noqa: F401 - these make the faults
from tests.proofs.zoo.making import FAULTS, SETTINGS, TASKS, Fault, nothing
from unisono.config.schema.run import RunConfig
from unisono.proof import judgement
from unisono.proof.cases import Case, ProofSettings
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.proof.verdict import Verdict
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

PROOF = ProofSettings(global_batch=8, layouts=["ddp:2"])
BEGIN, END = "<!-- zoo: written by python -m tests.proofs.zoo.zoo -->\n", "<!-- end -->"


_RESUMED = ("whole", "resumed", "resumed twice")


def name_of(fault: Fault) -> str:
    """Of the clean run of a fault."""
    rows = [] if fault.micro_batch == 2 else [f"m{fault.micro_batch}"]
    again = "by a new task" if fault.new_task else _RESUMED[fault.resumed]
    return " ".join(["clean", fault.twin or fault.task, fault.strategy, again, *rows])


REFERENCES = {f"single {task}": Fault(nothing, "", task) for task in TASKS}
BEGUN = {name_of(f): f.clean for f in (replace(f, new_task=False, twin="") for f in FAULTS.values() if f.new_task)}
CLEAN = BEGUN | {name_of(fault): fault.clean for fault in FAULTS.values()}
RUNS = {**REFERENCES, **CLEAN, **FAULTS}


def case_of(name: str, fault: Fault, precision: str = "fp64") -> Case:
    layout = {"strategy": fault.strategy, "micro_batch": fault.micro_batch}
    reference, other = f"single {fault.task}", fault.micro_batch != 2
    case = Case(name, 2, layout, precision, reference, other_micro_batch=other, saves=(1, 2))
    if fault.new_task:
        whole = replace(fault, new_task=False, twin="")
        return replace(case, starts_from=name_of(whole), starts_after=2)
    return replace(case, interrupted=tuple(range(1, fault.resumed + 1)))


def configured(case: Case) -> RunConfig:
    return configuration(
        layout={"world_size": case.world_size, "strategy": "single", **case.layout},
        train={"global_batch": 8, "steps": 6, "precision": case.precision, "clip_norm": 0.05, "guard_every": 10**9},
        optim=SGD,
        schedules={"lr": {"kind": "linear", "warmup": 1}},
        eval={"rows": 7},
        **SETTINGS.get((case.reference or case.name).removeprefix("single "), {}),
    )


def run(place: ProcessInfo, group: Communicator, names: list[str], root: Path) -> None:
    """Record runs, each with its fault."""
    for name in names:
        fault = RUNS[name]
        case = case_of(name, fault) if place.world_size > 1 else Case(name, 1, {"micro_batch": 2}, "fp64")
        with fault.made():
            case_recorder.record_case(TASKS[fault.task](), configured(case), place, group, case, PROOF, root)


def verdicts(root: Path) -> dict[str, Verdict]:
    """What a proof says of every fault, and of its clean twin."""
    many = [*CLEAN, *FAULTS]
    processes.alone(run, list(REFERENCES), root)
    processes.run(run, 2, many, root, timeout=900)
    every = [Case(name, 1, {"micro_batch": 2}, "fp64") for name in REFERENCES]
    every += [case_of(name, RUNS[name]) for name in many]
    traces = {case.name: Trace(trace_folder(root, case.name)) for case in every}
    found, _ = judgement.judge_cases(every, traces, adaptive=False)
    return {verdict.case: verdict for verdict in found}


def table(found: dict[str, Verdict]) -> str:
    """The table of the docs: fault, what caught it, how early, and what it was called."""
    lines = ["| fault | verdict | caught by | at | called |", "|---|---|---|---|---|"]
    for name in FAULTS:
        verdict = found[name]
        first = verdict.first
        caught = "an error before the first step" if verdict.fault else first.quantity if first else _why(verdict)
        at = "start" if verdict.fault or not first or first.quantity == "initial parameters" else _at(first)
        told = verdict.diagnosis
        called = f"[{told.fault}](diagnoses.md#{told.more.rpartition(' ')[2]})" if told else "–"
        lines.append(f"| {name} | {mark_of(verdict)} | {caught} | {at} | {called} |")
    return "\n".join(lines) + "\n"


def mark_of(verdict: Verdict) -> str:
    """ABSTAIN where nothing failed, and something that should be compared could not be."""
    abstained = any(c.mark == "ABSTAIN" and c.why != "there is none" for c in verdict.compared)
    return "ABSTAIN" if verdict.mark == "PASS" and abstained else verdict.mark


def _why(verdict: Verdict) -> str:
    return next((f"{c.quantity}: {c.why}" for c in verdict.compared if c.why not in ("", "there is none")), "nothing")


def _at(first: Any) -> str:
    return f"step {first.worst.step}" if first.worst.step else "end"


def main() -> None:
    from tests.proofs.zoo import zoo  # processes look functions up by the name of their module

    page = Path(__file__).parents[3] / "docs" / "proof.md"
    with tempfile.TemporaryDirectory() as folder:
        made = table(zoo.verdicts(Path(folder)))
    print(made)
    if "--write" in sys.argv:
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
