"""Every fault of the JAX zoo is caught and called by its name, and the clean twin of each passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import SGD, configuration
from tests.proofs.zoo import zoo
from tests.proofs.zoo.jax_faults import FAULTS, REFERENCES, ROWS, TASKS, Fault
from unisono.config.schema.run import RunConfig
from unisono.engines.jax.parallel import runtime
from unisono.proof import judgement
from unisono.proof.cases import Case, ProofSettings
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.proof.verdict import Verdict
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

pytestmark = pytest.mark.slow
PROOF = ProofSettings(global_batch=ROWS, layouts=["ddp:2"], steps=3)


def clean_name(fault: Fault) -> str:
    return " ".join(["clean", fault.clean.task, fault.strategy, "whole" * fault.whole, "resumed" * fault.resumed])


CLEAN = {clean_name(fault): fault.clean for fault in FAULTS.values()}
RUNS = {**REFERENCES, **CLEAN, **FAULTS}


def case_of(name: str) -> Case:
    fault = RUNS[name]
    if name in REFERENCES:
        return Case(name, 1, {"micro_batch": ROWS if fault.whole else 2}, "fp64")
    layout = {"strategy": fault.strategy, "micro_batch": ROWS // 2 if fault.whole else 2}
    reference = f"single {fault.task}{' whole' * fault.whole}"
    stops = (1,) if fault.resumed else ()
    return Case(name, 2, layout, "fp64", reference, interrupted=stops, other_micro_batch=fault.whole)


def configured(case: Case) -> RunConfig:
    return configuration(
        layout={"engine": "jax", "world_size": case.world_size, "devices": 1, "strategy": "single", **case.layout},
        train={"global_batch": ROWS, "steps": 3, "precision": "fp64", "clip_norm": 0.05, "guard_every": 10**9},
        optim=SGD, eval={"rows": 7},
    )  # fmt: skip


def run(place: ProcessInfo, group: Communicator, names: list[str], root: Path) -> None:
    """Record runs, each with its fault."""
    runtime.start(configured(case_of(names[0])), place, group, ["127.0.0.1"] * 2)
    for name in names:
        case, fault = case_of(name), RUNS[name]
        with fault.made():
            case_recorder.record_case(TASKS[fault.task](), configured(case), place, group, case, PROOF, root)
    runtime.stop(group)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    root = tmp_path_factory.mktemp("zoo")
    many = [*CLEAN, *FAULTS]
    processes.alone(run, list(REFERENCES), root)
    processes.run(run, 2, many, root, timeout=900)
    every = [case_of(name) for name in RUNS]
    traces = {case.name: Trace(trace_folder(root, case.name)) for case in every}
    judged, _ = judgement.judge_cases(every, traces, adaptive=False)
    return {verdict.case: verdict for verdict in judged}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_and_called_by_its_name(found: dict[str, Verdict], name: str) -> None:
    verdict, fault = found[name], FAULTS[name]
    assert zoo.mark_of(verdict) == fault.mark, [(c.quantity, c.mark, c.why) for c in verdict.compared]
    if fault.mark == "FAIL":
        assert verdict.diagnosis is not None
        assert verdict.diagnosis.fault == fault.named, (verdict.diagnosis, verdict.fault)


@pytest.mark.parametrize("name", CLEAN)
def test_its_clean_twin_passes(found: dict[str, Verdict], name: str) -> None:
    verdict = found[name]
    assert verdict.mark == "PASS", (verdict.first, verdict.fault)
    assert {c.quantity for c in verdict.compared if c.mark == "PASS"} >= {"sample ids", "raw gradients", "parameters"}
