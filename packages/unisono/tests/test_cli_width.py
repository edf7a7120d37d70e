"""What a terminal of 60, 80 or 120 columns shows: no line is wrapped by the terminal, and no word is lost."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import unisono as face
from packages.unisono.tests.screen import check_widths
from unisono.cli.main import main
from unisono.proof import report
from unisono.proof.comparison import ComparedQuantity, Difference, Mark
from unisono.proof.recording.trace import QUANTITIES
from unisono.proof.verdict import Verdict
from unisono.runtime import console

SPIRALS = f"{Path(__file__).parents[3]}/examples/spirals.py:Spirals"
SMALL = {"layout.world_size": 1, "layout.device": "cpu", "layout.threads": 1, "observe.progress": False}
SLOW = pytest.mark.slow
COMMANDS = [
    "check SPIRALS run.name=one",
    "config SPIRALS optim.lr=1e-2",
    "describe SPIRALS",
    "data preview SPIRALS count=3",
    "explain",
    pytest.param("doctor --no-rates", marks=SLOW),
    pytest.param("list RUNS", marks=SLOW),
    pytest.param("diagnose RUNS/one", marks=SLOW),
    pytest.param("compare RUNS/one RUNS/a-name-of-several-words out=OUT", marks=SLOW),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w")
    for name, rate in (("one", 1e-2), ("a-name-of-several-words", 1e-3)):
        steps = {"train.steps": 3, "train.global_batch": 8, "optim.lr": rate, "optim.weight_decay": 10 * rate}
        face.train(SPIRALS, {**SMALL, **steps, "run.dir": str(folder), "run.name": name})
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_wraps_no_line_and_loses_no_word_at_any_width(
    command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = request.getfixturevalue("runs") if "RUNS" in command else Path()
    places = {"SPIRALS": SPIRALS, "RUNS": str(runs), "OUT": str(runs / "comparison")}
    given = shlex.split(re.sub("SPIRALS|RUNS|OUT", lambda name: places[name[0]], command))
    check_widths(monkeypatch, lambda: main(given))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("mark", ["PASS", "FAIL", "ABSTAIN"])
def test_a_proof_wraps_no_line_and_loses_no_word_whatever_its_verdict(
    mark: Mark, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = [ComparedQuantity(name, "PASS", Difference(3e-16)) for name in QUANTITIES]
    why = "rows are normalised by the statistics of each micro-batch, so that two processes are another computation"
    compared[3] = ComparedQuantity(QUANTITIES[3], mark, Difference(0.5, 1, "encoder.weight", 1.5, 1.0), why=why)
    cases = ["ddp:2 m4 fp64", "fsdp:2 m4 resumed from single fp64", "single m4 resumed from fsdp:2 fp64"]
    verdicts = [Verdict(case, "single m4 fp64", False, compared) for case in cases]
    alone = [Verdict("single m4 fp64", "", False)]

    def tell() -> None:
        lines = report.format_verdicts(verdicts, alone, full=full, width=console.terminal_width())
        console.say("\n".join(lines))

    check_widths(monkeypatch, tell)
