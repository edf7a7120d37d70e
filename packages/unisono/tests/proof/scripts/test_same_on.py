"""`same_on`: a test of pytest that is a proof."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.tasks import LinearTask
from unisono.proof import same_on
from unisono.proof.scripts.recording.script_hooks import find_watch
from unisono.proof.scripts.same_on import prove_subject
from unisono.runtime.errors import ConfigError
from unisono.task import Task

TESTS = """
import pytest
import torch
import torch.distributed as dist
from torch import nn

from unisono.proof import same_on


def synchronised():
    fit(dist.ReduceOp.SUM)


def unsynchronised():
    fit(None)


def fit(operation):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(16, 3)[dist.get_rank() :: dist.get_world_size()]
    for _ in range(4):
        (model(rows).square().sum() / 16).backward()
        if operation is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, operation)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("function", [synchronised, unsynchronised])
@same_on(worlds=[1, 2], settings=["steps=2"])
def test_fit(function, tmp_path):
    assert tmp_path.is_dir()  # fixtures are there
    return function
"""


@pytest.mark.slow
def test_a_test_passes_with_its_proof_and_fails_with_table_and_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "test_training.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "test_training.py"],
        cwd=tmp_path, env=jobs.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    failed = done.stdout.partition("= FAILURES")[2]
    assert "2 processes: FAIL raw gradients: step 1" in failed
    assert "likely: Gradients are not synchronised" in failed
    assert "same_on.py" not in failed  # no traceback of ours


@pytest.mark.slow
@same_on(worlds=[1, 2], settings=["vary=[]", "steps=2", "precisions=[fp64]"])
def test_task() -> type[Task]:
    return LinearTask


def test_worlds_of_a_task_are_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        "unisono.proof.scripts.same_on.prove_task", lambda *given: seen.append(given) or mock.Mock(passed=True)
    )
    prove_subject(LinearTask, [1, 2, 4], ["steps=2"])
    assert seen == [(LinearTask, ["layouts=[ddp:2,fsdp:2,ddp:4,fsdp:4]", "steps=2"])]


def test_what_is_no_subject_of_a_proof_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the test returned NoneType; return what is to be proved"):
        prove_subject(None, [1, 2], [])
    with pytest.raises(ConfigError, match=r"worlds=\[1\]: one process is compared with 2 or more"):
        prove_subject("task.py:Task", [1], [])
    with pytest.raises(ConfigError, match="a lambda has no name"):
        prove_subject(lambda: None, [1, 2], [])
    with pytest.raises(ConfigError, match="'speed=2' is not a setting"):
        prove_subject(Path("train.py"), [1, 2], ["speed=2"])


def test_a_proof_that_compares_nothing_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def prove(*arguments: Any) -> tuple[int, str]:
        seen.append(arguments)
        return 2, "ABSTAIN"

    monkeypatch.setattr("unisono.proof.scripts.same_on.prove_subject", prove)

    @same_on(worlds=[1, 4], settings=["steps=3"])
    def test(name: str) -> str:
        return f"{name}.py:Task"

    with pytest.raises(pytest.fail.Exception, match="ABSTAIN"):
        test("my")
    assert seen == [("my.py:Task", [1, 4], ["steps=3"])]


@pytest.mark.needs("transformers", "pytorch_lightning")
def test_callbacks_do_nothing_outside_of_a_proof() -> None:
    from unisono.proof import LightningCallback, TransformersCallback

    assert find_watch() is None
    TransformersCallback().on_step_begin(None, None, None)
    LightningCallback().on_fit_end(None, None)
