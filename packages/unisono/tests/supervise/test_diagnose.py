"""What the files of a run say, in sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.cli import main
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import RunError
from unisono.supervise.diagnose import diagnose_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of eight steps of which six are made, with checkpoints of steps 2 and 4."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("train: {steps: 8}\n")
    lines = [{"step": step, "loss": 9.0 - step} for step in range(1, 7)]
    lines.insert(2, {"step": 2, "restart": 1, "code": 9, "why": "rank 1 died."})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (2, 4):
        shards = [ArrayShard("model/w", (2,), (0,), torch.ones(2))]
        commit.save_checkpoint(tmp_path / "checkpoints", Snapshot(step, shards, {"step": step}), SingleProcess(), 3)
    return tmp_path


def fault(run: Path, rank: int, kind: str, text: str, code: int) -> None:
    told = {"rank": rank, "kind": kind, "text": text, "code": code, "fault": "", "time": float(rank)}
    (run / "logs" / f"rank-{rank:05d}.fault.json").write_text(json.dumps(told))


def found(run: Path, **more: Any) -> None:
    ranks = {
        "0": {"pid": 7, "at": "in step 7, compute, waiting for x"},
        "1": {"pid": 8, "at": "here", "where": "a.py:3"},
    }
    about = {"kind": "StuckError", "code": 10, "text": "rank 1 is stuck.", "ranks": ranks, "host": "h", "time": 0.0}
    (run / "logs" / "monitor-node-0.json").write_text(json.dumps({**about, "stacks": "logs/stacks/now", **more}))


def page(run: Path) -> str:
    return "\n".join(diagnose_run(run))


def test_what_is_made_saved_and_lost_is_told(run: Path):
    lines = diagnose_run(run)
    assert lines[0] == f"{run}: 6 of 8 steps done; loss of the last step: 3"
    assert "  step-00000004 is the newest good checkpoint: the hashes of all its files match" in lines
    assert "  step-00000002 is good" in lines
    assert "  Steps 5 to 6 are not saved and would be repeated" in lines
    assert "  1: from step 2, after: rank 1 died." in lines
    assert any(line.startswith("  No error is recorded: it is still running, was interrupted, or") for line in lines)


def test_a_last_loss_that_is_not_finite_is_told(run: Path):
    with (run / "events.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": null}\n')
    assert diagnose_run(run)[0] == f"{run}: 7 of 8 steps done; loss of the last step: not finite"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_the_newest_good_one(run: Path):
    file = next((run / "checkpoints" / "step-00000004").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    text = page(run)
    assert f"step-00000004 is damaged: {file}" in text
    assert "step-00000002 is the newest good checkpoint" in text
    assert "Steps 3 to 6 are not saved" in text


def test_what_the_monitor_found_comes_before_who_waited_in_vain(run: Path):
    found(run)
    fault(run, 0, "DeadlineError", "rank 0 waited for x", 5)
    text = page(run)
    assert "How it ended\n  rank 1 is stuck.\n" in text
    assert "  rank 0 on h (process 7): in step 7, compute, waiting for x\n" in text
    assert "  rank 1 on h (process 8): here, at a.py:3\n" in text
    assert "  all stacks: logs/stacks/now\n" in text
    assert "What to do\n  Check the line that the message names." in text


def test_a_fault_of_the_task_comes_before_what_the_monitor_found(run: Path):
    found(run)
    fault(run, 1, "ValueError", "Traceback (most recent call last):\n  a\n  b\n  c\n  d\nValueError: the sky fell", 1)
    text = page(run)
    assert "How it ended\n  rank 1: Traceback (most recent call last):\n" in text
    assert "ValueError: the sky fell" in text
    assert "Fix the code at the line that the error names" in text


def test_an_error_of_the_task_is_its_sentence_and_the_innermost_line(run: Path):
    outer, inner = '  File "a.py", line 1, in loss\n    f()\n', '  File "b.py", line 2, in f\n    x.foo()\n    ^^^^^'
    fault(run, 1, "AttributeError", f"AttributeError: no foo; loss() receives tensors\n{outer}{inner}", 1)
    text = page(run)
    assert "How it ended\n  rank 1: AttributeError: no foo; loss() receives tensors\n    …\n" in text
    assert '  File "b.py", line 2, in f\n        x.foo()\n' in text and "a.py" not in text
    assert "  rank 1 reported: AttributeError: no foo" in text


def test_a_finished_run_needs_nothing(run: Path):
    with (run / "events.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 1.0}\n')
    text = page(run)
    assert "It finished: all steps are done, and no error was recorded." in text
    assert "What to do" not in text


def test_the_verb_prints_the_page(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main.main(["diagnose", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == diagnose_run(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(RunError, match=r"is not a run directory \(no config.yaml\)"):
        diagnose_run(tmp_path)


def test_a_run_that_was_told_in_epochs_is_finished_after_its_steps(run: Path):
    (run / "config.yaml").write_text("train: {epochs: 2}\n")
    assert diagnose_run(run)[0] == f"{run}: 6 steps done; loss of the last step: 3"
    (run / "fingerprint.json").write_text(json.dumps({"data": {"steps": 6}}))
    assert diagnose_run(run)[0].startswith(f"{run}: 6 of 6 steps done")
    assert "  It finished: all steps are done, and no error was recorded." in diagnose_run(run)
