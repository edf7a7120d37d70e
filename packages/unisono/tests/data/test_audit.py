"""What a run consumed, written down and held against the plan: any way of tampering with either is seen."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from packages.unisono.tests.data import made
from packages.unisono.tests.data.made import BAD, BATCH, SIZE, Augmented, WithBad, packed_plan
from unisono.data import ledger
from unisono.data.audit import AuditReport, audit
from unisono.data.order.plan import Plan
from unisono.runtime.errors import RunError
from unisono.task import SampleContext, Task


def _made(folder: Path, first: int, last: int, world: int = 1, **how: Any) -> None:
    made.recorded(WithBad(), folder, first, last, world, start=f"from {first} on {world}", **how)


def _audited(folder: Path, of: Plan | None = None, *, task: Task | None = None, checkpoint: int = 0) -> AuditReport:
    task = task or WithBad()
    return made.audited(folder, of or made.plan(), task, task.data(), checkpoint=checkpoint)


def _lines(folder: Path, rank: int = 0) -> list[str]:
    return (folder / "ledger" / f"rank-{rank:05d}.jsonl").read_text().splitlines()


def _write(folder: Path, lines: list[str], rank: int = 0, *, chained: bool = False) -> None:
    """Lines in place of those of a rank; with digests that fit them, where whoever did it is thorough."""
    chain, done = "", []
    for line in lines:
        body = line.rpartition(',"chain":"')[0] + "}"
        chain = ledger._chain_digest(chain, body)
        done.append(f'{body[:-1]},"chain":"{chain}"}}' if chained else line)
    (folder / "ledger" / f"rank-{rank:05d}.jsonl").write_text("".join(f"{line}\n" for line in done))


def _edited(line: str, **values: Any) -> str:
    found = json.loads(line)
    chain = found.pop("chain")
    return json.dumps({**found, **values, "chain": chain}, separators=(",", ":"))


# a run as it should be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worlds", [(1, 1, 1), (1, 2, 3), (6, 1, 2)])
def test_a_run_over_resumes_and_world_sizes_passes(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    for (first, last), world in zip([(0, 3), (2, 5), (4, 6)], worlds, strict=True):
        _made(tmp_path, first, last, world)
    report = _audited(tmp_path, checkpoint=6)
    assert report.faults == []
    assert report.is_clean
    assert (report.steps, report.starts) == (6, [(0, worlds[0]), (2, worlds[1]), (4, worlds[2])])
    bad = [int(row) for step in range(6) for row in made.plan().batch(step) if row in BAD]
    assert report.samples == 68 - len(bad)
    assert [row for _, row, _ in report.masked] == bad
    assert report.repeated == worlds[0] + worlds[1]  # steps 2 and 4 were made twice
    assert report.rebuilt > 0
    assert "PASS" in str(report)


def test_the_ledger_is_the_same_from_threads_and_processes(tmp_path: Path) -> None:
    _made(tmp_path / "a", 0, 3, workers=3)
    _made(tmp_path / "b", 0, 3, workers=2, worker_kind="processes")
    assert _lines(tmp_path / "a")[1:] == _lines(tmp_path / "b")[1:]
    assert len(_lines(tmp_path / "a")) == 4


def test_packed_rows_pass_too(tmp_path: Path) -> None:
    _made(tmp_path, 0, 3, 2, of=packed_plan())
    _made(tmp_path, 2, 5, 3, of=packed_plan())
    report = _audited(tmp_path, packed_plan(), checkpoint=5)
    assert report.faults == []
    assert (report.steps, report.repeated) == (5, 2)
    assert report.samples > 5 * BATCH


def test_steps_that_a_crash_left_untold_are_no_fault_unless_a_checkpoint_has_them(tmp_path: Path) -> None:
    _made(tmp_path, 0, 4, 2)
    _write(tmp_path, _lines(tmp_path, 1)[:-1], rank=1)
    assert _audited(tmp_path, checkpoint=3).steps == 3
    assert _audited(tmp_path, checkpoint=3).is_clean
    assert "step 3: no process built rows 6 to 11" in _audited(tmp_path, checkpoint=4).faults


def test_a_line_that_was_cut_off_by_a_crash_is_taken_back_and_the_run_goes_on(tmp_path: Path) -> None:
    _made(tmp_path, 0, 3)
    path = tmp_path / "ledger" / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert _audited(tmp_path).is_clean
    assert _audited(tmp_path).steps == 2
    _made(tmp_path, 2, 6)
    assert json.loads(_lines(tmp_path)[3])["torn"] > 30
    assert _audited(tmp_path, checkpoint=6).faults == []
    assert _audited(tmp_path, checkpoint=6).steps == 6


# tampering ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps on two processes, then step 2 again and the rest on one."""
    _made(tmp_path, 0, 3, 2)
    _made(tmp_path, 2, 6, 1)
    assert _audited(tmp_path, checkpoint=6).is_clean
    return tmp_path


Change = Callable[[list[str]], list[str]]
CHANGES: dict[str, tuple[Change, str]] = {
    "a line dropped": (lambda lines: [*lines[:2], *lines[3:]], "step 1: no process built rows 0 to 5"),
    "a line twice": (lambda lines: [*lines[:3], lines[2], *lines[3:]], "step 1: rows 0 to 5 were built twice"),
    "the last line dropped": (lambda lines: lines[:-1], "step 5: no process built rows 0 to 7"),
    "other rows": (
        lambda lines: [*lines[:2], _edited(lines[2], rows=[0, 5]), *lines[3:]],
        "step 1: no process built rows 5 to 5",
    ),
    "rows of another rank": (
        lambda lines: [*lines[:2], _edited(lines[2], rows=[0, 7]), *lines[3:]],
        "step 1: rows 6 to 6 were built twice",
    ),
    "other samples": (
        lambda lines: [*lines[:2], _edited(lines[2], ids="0" * 16), *lines[3:]],
        "step 1: rank 0 built samples in rows 0 to 5 that differ from the plan",
    ),
    "a sample more is said to be bad": (
        lambda lines: [*lines[:2], _edited(lines[2], masked=[[0, 1, 0, 0, "x"]]), *lines[3:]],
        "step 1: rank 0 built samples in rows 0 to 5 that differ from the plan",
    ),
    "a step repeated with other content": (
        lambda lines: [*lines[:3], _edited(lines[3], content="0" * 16), *lines[4:]],
        "step 2 contained other samples when it was repeated after an interruption",
    ),
    "a step that is not in the plan": (
        lambda lines: [*lines, _edited(lines[-1], step=6)],
        "step 6 is not one of the 6 of the plan",
    ),
    "a start left out": (
        lambda lines: [line for line in lines if '"first":2' not in line],
        "step 2: rows 0 to 5 were built twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_ledger_that_was_tampered_with_fails(run: Path, change: str) -> None:
    act, says = CHANGES[change]
    lines = _lines(run)
    _write(run, act(lines))
    careless = _audited(run, checkpoint=6)
    if change != "the last line dropped":  # which looks like a crash, but for the checkpoint
        assert any("it was changed, or lines before it are missing" in fault for fault in careless.faults)
    _write(run, act(lines), chained=True)  # with digests that fit, the plan still tells
    thorough = _audited(run, checkpoint=6)
    assert not any("it was changed" in fault for fault in thorough.faults)
    assert says in thorough.faults
    assert not thorough.is_clean
    assert "FAIL" in str(thorough)


def test_a_missing_file_fails(run: Path) -> None:
    (run / "ledger" / "rank-00001.jsonl").unlink()
    report = _audited(run, checkpoint=6)
    assert "the start from step 0 has no ledger of ranks 1" in report.faults
    assert "step 0: no process built rows 6 to 11" in report.faults


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"world_size": 2**62}, f"the start from step 2 has no ledger of ranks 1 to {2**62 - 1}"),
        ({"first": 2**62}, f"steps 23 to {2**62 - 1} have no lines"),
    ],
)
def test_a_start_that_claims_any_number_of_ranks_or_steps_is_told_at_once(
    run: Path, values: dict[str, int], says: str
) -> None:
    """Each of them was looked for by itself, for ever, in the memory of all: anybody may have written the ledger."""
    lines = _lines(run)
    _write(run, [_edited(line, **values) if '"first":2' in line else line for line in lines], chained=True)
    assert says in _audited(run, checkpoint=6).faults


@pytest.mark.parametrize(
    ("of", "says"),
    [(made.plan(seed=1), "that differ from the plan"), (made.plan(epochs=2.0), "step 5: rows 2 to 7 were built but")],
)
def test_another_plan_fails(run: Path, of: Plan, says: str) -> None:
    assert any(says in fault for fault in _audited(run, of, checkpoint=6).faults)


def test_data_that_hold_something_else_now_fail(run: Path) -> None:
    class Changed(WithBad):
        def sample(self, record: Any, context: SampleContext) -> Any:
            found = super().sample(record, context)
            found["noise"][1] += np.float32(1e-6)
            return found

    report = _audited(run, task=Changed(), checkpoint=6)
    assert report.rebuilt == 0
    assert all("its rows now differ from those that were trained on" in fault for fault in report.faults)
    assert len(report.faults) == len({fault.split(":")[0] for fault in report.faults}) > 0


def test_bad_rows_that_have_been_mended_since_fail(run: Path) -> None:
    report = made.audited(run, made.plan(), Augmented(), np.arange(SIZE), checkpoint=6, remake=30)
    assert not report.is_clean


# a whole run --------------------------------------------------------------------------------------------------------

RECIPE = """
import os
import numpy as np, torch
from torch import nn
from unisono import Loss, Task

class Line(Task):
    def data(self):
        return np.load(os.environ["UNISONO_TEST_ROWS"])

    def sample(self, record, context):
        if record[0] > 2.5:
            raise ValueError("too far out")
        return {"x": record + context.rng.normal(scale=1e-3, size=4).astype(np.float32)}

    def build(self):
        return nn.Linear(4, 1)

    def counts(self, batch):
        return {"row": float(len(batch["x"]))}

    def outputs(self, model, batch, context):
        return model(batch["x"])

    def loss(self, outputs, batch, context):
        return Loss({"row": (outputs[:, 0] - batch["x"].sum(1)).square().sum()})
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    rows = np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)
    rows[7] = 3.0
    np.save(tmp_path / "rows.npy", rows)
    monkeypatch.setenv("UNISONO_TEST_ROWS", str(tmp_path / "rows.npy"))
    (tmp_path / "line.py").write_text(textwrap.dedent(RECIPE))
    return f"{tmp_path / 'line.py'}:Line"


def _train(recipe: str, folder: Path, *more: str) -> Path:
    import unisono

    settings = (
        "train.global_batch=12", "train.steps=60", "optim={kind: sgd, lr: 0.01}", f"run.dir={folder}", "run.name=a",
        "checkpoint.every=20", "data.on_error=mask", "layout.device=cpu", "observe.progress=false",
    )  # fmt: skip
    path: Path = unisono.train(recipe, [*settings, *more]).folder
    return path


def test_a_run_keeps_a_ledger_that_its_audit_confirms(recipe: str, tmp_path: Path) -> None:
    from packages.unisono.tests.runs import interrupted
    from unisono.observe import events

    with interrupted(before=33):
        _train(recipe, tmp_path, "layout.micro_batch=4")
    path = _train(recipe, tmp_path, "layout.micro_batch=4", "data.workers=2")
    report = audit(path)
    assert report.faults == []
    assert (report.steps, report.starts, report.repeated) == (60, [(0, 1), (20, 1)], 13)
    assert {row for _, row, _ in report.masked} == {7}
    assert len(report.masked) == 2  # 720 positions are twice 300 and a bit
    told = [event["masked"] for event in events.read_events(path / "events.jsonl") if "masked" in event]
    assert told == [1, 1]
    rows = np.load(tmp_path / "rows.npy")
    np.save(tmp_path / "rows.npy", rows + np.float32(1e-3))
    assert not audit(path, remake=1).is_clean
    assert audit(path, remake=0).is_clean
    np.save(tmp_path / "rows.npy", rows[:-1])
    assert not audit(path, remake=0).is_clean
    np.save(tmp_path / "rows.npy", rows)
    settings = yaml.safe_load((path / "config.yaml").read_text())
    settings["run"]["seed"] = 1
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert not audit(path, remake=0).is_clean


def test_a_run_of_a_mixture_is_confirmed_and_another_mixture_is_not(recipe: str, tmp_path: Path) -> None:
    with (tmp_path / "line.py").open("a") as file:
        file.write("\n\nclass Two(Line):\n    def data(self):\n        rows = super().data()\n")
        file.write("        return {'a': rows[:200], 'b': rows[200:]}\n")
    weights = "data.mixture.weights={a: 1, b: 3}"
    path = _train(recipe.replace(":Line", ":Two"), tmp_path, "train.steps=20", weights)
    report = audit(path)
    assert report.faults == []
    assert (report.steps, report.samples + len(report.masked)) == (20, 240)
    settings = yaml.safe_load((path / "config.yaml").read_text())
    settings["data"]["mixture"]["weights"] = {"a": 3, "b": 1}
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert not audit(path, remake=0).is_clean


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_processes_is_confirmed(recipe: str, tmp_path: Path) -> None:
    _train(recipe, tmp_path, "layout.world_size=2", "train.steps=40", "layout.micro_batch=2", "schedules=constant")
    more = ("data.worker_kind=processes", "data.workers=2", "run.allow_change=[train.steps]", "schedules=constant")
    path = _train(recipe, tmp_path, *more, "layout.micro_batch=6")
    report = audit(path, remake=5)
    assert report.faults == []
    assert (report.steps, report.starts) == (60, [(0, 2), (40, 1)])


def test_a_folder_without_a_run_or_a_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory \(no config\.yaml\)"):
        audit(tmp_path)
    (tmp_path / "config.yaml").write_text("recipe: x\n")
    with pytest.raises(RunError, match="has no ledger"):
        audit(tmp_path)
