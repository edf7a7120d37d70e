"""A proof passes with every optimizer, and what an optimizer saves continues on the same layout and on another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, distance
from packages.unisono.tests.runs import training as training_of
from packages.unisono.tests.tasks import TransformerTask
from tests.proofs.test_optimizers import NO_TRUE_GRADIENT, OPTIMIZERS
from tests.proofs.test_resume_is_exact import final
from unisono.config.schema.run import RunConfig
from unisono.proof import judgement
from unisono.proof.cases import EPSILON, Case, ProofSettings
from unisono.proof.recording import case_recorder
from unisono.proof.recording.trace import Trace, trace_folder
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

pytestmark = pytest.mark.slow

NEW = {name: optim for name, optim in OPTIMIZERS.items() if name != "adamw"}

# proofs -------------------------------------------------------------------------------------------------------------

PROOF = ProofSettings(global_batch=8)
IN_FP32 = ("muon and lion", "adafactor")  # all kinds of state between them: momenta, and means of rows and columns


def precisions_of(name: str) -> tuple[str, ...]:
    return ("fp64", "fp32") if name in IN_FP32 else ("fp64",)


def cases_of(name: str) -> list[Case]:
    found = []
    for precision in precisions_of(name):
        alone = Case(f"{name} single m2 {precision}", 1, {"micro_batch": 2}, precision)
        found += [
            alone,
            Case(f"{name} perturbed {precision}", 1, alone.layout, precision, perturbed=EPSILON[precision]),
        ]
        found.append(
            Case(f"{name} m1 {precision}", 1, {"micro_batch": 1}, precision, alone.name, other_micro_batch=True)
        )
        for strategy in ("ddp", "fsdp"):
            layout = {"strategy": strategy, "micro_batch": 2}
            plain = Case(f"{name} {strategy} {precision}", 2, layout, precision, alone.name)
            found.append(plain)
            if precision == "fp64":
                again = f"{name} {strategy} resumed"
                found.append(Case(again, 2, layout, precision, plain.name, bitwise=True, interrupted=(1, 2)))
                there = f"{name} {strategy} from single"
                found.append(Case(there, 2, layout, precision, alone.name, starts_from=alone.name, starts_after=1))
    return found


def config_of(case: Case, optim: dict[str, Any]) -> RunConfig:
    return configuration(
        layout={"world_size": case.world_size, "strategy": "single", **case.layout},
        train={"global_batch": 8, "steps": 6, "precision": case.precision, "guard_every": 10**9},
        optim=optim,
    )


def prove_all(place: ProcessInfo, group: Communicator, root: Path) -> None:
    for name, optim in NEW.items():
        for case in cases_of(name):
            if case.world_size == place.world_size:
                case_recorder.record_case(TransformerTask(), config_of(case, optim), place, group, case, PROOF, root)


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("proofs")
    processes.alone(prove_all, root)
    processes.run(prove_all, 2, root, timeout=600)
    return root


@pytest.mark.parametrize("name", NEW)
def test_a_proof_passes(proofs: Path, name: str) -> None:
    every = cases_of(name)
    traces = {case.name: Trace(trace_folder(proofs, case.name)) for case in every}
    assert not any(trace.facts.fault for trace in traces.values())
    verdicts, _ = judgement.judge_cases(every, traces, adaptive=True)
    assert len(verdicts) == len(precisions_of(name)) * 3 + 4
    assert {verdict.mark for verdict in [*verdicts]} == {"PASS"}, [(v.case, v.first) for v in verdicts]
    for verdict in verdicts:
        passed = {compared.quantity for compared in verdict.compared if compared.mark == "PASS"}
        assert {"raw gradients", "parameters", "optimizer state", "loss"} <= passed
        left_out = {found for compared in verdict.compared for found in compared.left_out}
        assert left_out <= NO_TRUE_GRADIENT
    updates = [c for v in verdicts for c in v.compared if c.quantity == "update" and c.mark == "PASS"]
    assert len(updates) >= 2 * len(precisions_of(name))


# state --------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
}
STEPS, CUT = 6, 4


def train(
    place: ProcessInfo, group: Communicator, root: Path, layout: str, runs: list[tuple[str, str, int | None]]
) -> None:
    """Runs as (optimizer, folder, the step after which it is interrupted)."""
    world, settings = LAYOUTS[layout]
    for name, folder, until in runs:
        config = configuration(
            layout={"world_size": world, "micro_batch": 3, **settings},
            train={"epochs": (STEPS * 12 - 5) / 27, "precision": "fp64"},
            optim=NEW[name],
            checkpoint={"every": 2},
            observe={"progress": False},
        )
        (root / folder).mkdir(exist_ok=True)
        with training_of(TransformerTask(), config, place, group, root / folder) as training:
            for step, _ in enumerate(training.steps(), training.first + 1):
                if step == until:
                    break


def go(root: Path, layout: str, runs: list[tuple[str, str, int | None]]) -> None:
    world = LAYOUTS[layout][0]
    if world == 1:
        processes.alone(train, root, layout, runs)
    else:
        processes.run(train, world, root, layout, runs, timeout=600)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each layout whole runs, runs that went on on it, and runs that went on from another."""
    root = tmp_path_factory.mktemp("states")
    for layout in LAYOUTS:
        whole = [(name, f"{layout} {name} whole", None) for name in NEW]
        go(root, layout, [*whole, *((name, f"{layout} {name} cut", CUT + 1) for name in NEW)])
    for layout in LAYOUTS:
        for name in NEW:
            for after in LAYOUTS:
                shutil.copytree(root / f"{layout} {name} cut", root / f"{layout} {name} to {after}")
    for layout, source in (("single", "hsdp 2×2"), ("fsdp×2", "single"), ("hsdp 2×2", "fsdp×2")):
        runs = [(name, f"{before} {name} to {layout}", None) for name in NEW for before in (layout, source)]
        go(root, layout, runs)
    return root


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_layout_goes_on_bit_for_bit(states: Path, layout: str, name: str) -> None:
    mine, reference = (final(states / f"{layout} {name} {which}", STEPS) for which in (f"to {layout}", "whole"))
    assert mine.keys() == reference.keys() and any(key.startswith("optimizer/") for key in mine)
    assert all(np.array_equal(mine[key], value) for key, value in reference.items())


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize(("before", "after"), [("hsdp 2×2", "single"), ("single", "fsdp×2"), ("fsdp×2", "hsdp 2×2")])
def test_another_layout_goes_on_to_the_floor(states: Path, before: str, after: str, name: str) -> None:
    mine, reference = (
        final(states / which, STEPS) for which in (f"{before} {name} to {after}", f"single {name} whole")
    )
    assert mine.keys() == reference.keys()
    worst = distance(mine, reference)
    assert max(v for key, v in worst.items() if not any(silent in key for silent in NO_TRUE_GRADIENT)) < 1e-12
