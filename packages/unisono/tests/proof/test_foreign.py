"""What `unisono.proof.compare` says of scripts that go right, go wrong, or do not go at all."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from packages.unisono.tests.launch import jobs
from unisono.config.code import references
from unisono.launch.processes import local_processes
from unisono.proof import Report, compare
from unisono.proof.cases import Case
from unisono.proof.recording.trace import Trace
from unisono.proof.scripts.judging import script_comparison
from unisono.proof.scripts.recording.script_process import ScriptRun
from unisono.runtime.errors import ConfigError, RunError

SCRIPT = '''
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROWS = 16


class Tied(nn.Module):
    """Predicts a word from a word; input and output embedding are one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.inner(self.embedding(words)))


def data():
    words = torch.randint(11, (3 * ROWS,), generator=torch.Generator().manual_seed(5))
    return words, (3 * words + 1) % 11


def train(world, wrap=DistributedDataParallel, model=Tied, draw=lambda: None):
    assert sys.argv[1:] == ["--as-given"]  # the command line of the script is there for it to read
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    draw()
    model = model()
    model = wrap(model) or model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    words, wanted = data()
    records = world.records(model, optimizer)
    for step in range(3):
        rows = range(step * ROWS + world.rank, (step + 1) * ROWS, world.size)
        logits = model(words[list(rows)])
        loss = nn.functional.cross_entropy(logits, wanted[list(rows)])
        loss.backward()
        records.gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world.size
        dist.all_reduce(total)
        records.step(rows=rows, loss=total, metrics={"loss": total})
    with torch.no_grad():
        for _ in range(2):
            records.evaluation({"loss": nn.functional.cross_entropy(model(words), wanted)})
    dist.destroy_process_group()
    return records


def train_sharded(world):
    def wrap(model):
        fully_shard(model.inner)
        fully_shard(model)

    return train(world, wrap)


def train_unseeded(world):
    return train(world, draw=torch.seed)


def train_with_batch_norm(world):
    class Normed(Tied):
        def __init__(self):
            super().__init__()
            self.inner.append(nn.BatchNorm1d(6))

    return train(world, model=Normed)


def train_counting_on_rank_0(world):
    class Counting(Tied):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, words):
            if world.rank == 0:
                self.seen += 1
            return super().forward(words)

    return train(world, lambda model: DistributedDataParallel(model, broadcast_buffers=False), Counting)


def train_from_numpy(world):
    class Scaled(Tied):
        def forward(self, words):
            logits = super().forward(words) @ torch.from_numpy(np.eye(11, dtype=np.float32))  # which is promoted
            torch.from_numpy(np.zeros((11, 11), np.float32)).addmm_(torch.eye(11), torch.eye(11))
            return logits

    return train(world, model=Scaled)


def train_hanging(world):
    if world.size > 1 and world.rank == 1:
        time.sleep(300)  # forgets the others
    return train(world)


def train_raising(world):
    if world.rank == 1:
        raise RuntimeError("the sky fell")
    return train(world)


def train_exiting(world):
    sys.exit("no data here")


def train_without_records(world):
    return None
'''


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("script") / "script_of_mine.py"
    path.write_text(SCRIPT)
    return references.load_module(f"{path}:train", str(path))


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", "--as-given"])


def ended(script: ModuleType, name: str, processes: int, folder: Path, timeout: float = 120.0) -> Trace:
    """One run of a function of the script."""
    run = ScriptRun(f"{script.__file__}:{name}", "fp64", timeout, "", arguments=sys.argv)
    return script_comparison.run_case(Case(f"{processes} processes", processes, {}, "fp64"), run, folder, threads=1)


def text(report: Report) -> str:
    return "\n".join(report.lines)


@pytest.mark.slow
def test_a_sharded_script_passes_in_everything_it_records(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    report = compare(script.train_sharded, worlds=[2], folder=tmp_path)
    assert (report.mark, report.exit_code) == ("PASS", 0), text(report)
    (verdict,) = report.verdicts
    sizes = {c.quantity: c.worst.size for c in verdict.compared if c.mark == "PASS"}
    assert set(sizes) == {
        "initial parameters", "sample ids", "loss", "raw gradients", "gradient norm", "clipped gradients",
        "learning rate", "optimizer state", "parameters", "replicas", "metrics", "evaluation",
    }  # fmt: skip
    assert max(sizes.values()) < 1e-13
    assert "evaluation repeats" in {c.quantity for c in verdict.invariants}
    assert capsys.readouterr().out == text(report) + "\n"
    assert report.certificate is not None
    held = json.loads(report.certificate.read_text())
    assert (held["verdict"], held["precision"], "script_of_mine.py" in held["code"]) == ("PASS", "fp64", True)
    one = Trace(tmp_path / "1_process")
    assert "head.weight" not in one.tensors("initial parameters")  # it is the embedding's
    assert one.tensors("parameters", 2)["embedding.weight"].dtype == "float64"


@pytest.mark.slow
def test_fp32_leaves_dtypes_as_they_are_and_has_a_floor_of_its_own(script: ModuleType, tmp_path: Path) -> None:
    report = compare(script.train, precision="fp32", folder=tmp_path, quiet=True)
    assert report.mark == "PASS", text(report)
    assert Trace(tmp_path / "1_process").tensors("parameters", 2)["embedding.weight"].dtype == "float32"
    (verdict,) = report.verdicts
    assert min(c.allowed for c in verdict.compared if c.quantity == "raw gradients") >= 1e-5


@pytest.mark.slow
def test_nothing_is_said_of_a_script_that_does_not_repeat_itself(script: ModuleType) -> None:
    report = compare(script.train_unseeded, quiet=True)
    assert (report.mark, report.exit_code) == ("ABSTAIN", 2)
    assert "initial weights differ in their last bit, differ in initial parameters by" in text(report)
    assert "give every generator a seed" in text(report)


@pytest.mark.slow
def test_local_batch_statistics_are_named(script: ModuleType) -> None:
    report = compare(script.train_with_batch_norm, quiet=True)
    (verdict,) = report.verdicts
    assert verdict.first is not None
    assert (report.mark, verdict.first.quantity) == ("FAIL", "loss")
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.fault == "Buffers are those of one process"
    assert "inner.2.running_mean" in verdict.diagnosis.because


@pytest.mark.slow
def test_a_buffer_that_rank_0_alone_has_as_one_process_has_it_is_a_fault(script: ModuleType) -> None:
    report = compare(script.train_counting_on_rank_0, quiet=True)
    (verdict,) = report.verdicts
    assert verdict.first is not None and verdict.diagnosis is not None
    assert (report.mark, verdict.first.quantity) == ("FAIL", "buffers are equal on all ranks"), text(report)
    assert verdict.diagnosis.fault == "Buffers are those of one process"
    assert "seen" in verdict.diagnosis.because


@pytest.mark.slow
def test_a_script_that_hangs_on_many_processes_is_a_fault_of_these(script: ModuleType) -> None:
    began = time.monotonic()
    report = compare(script.train_hanging, timeout=25, quiet=True)
    assert time.monotonic() - began < 150
    (verdict,) = report.verdicts
    assert (report.exit_code, verdict.mark) == (1, "FAIL")
    assert "it did not finish within 25 s (timeout=25)" in verdict.fault
    lines = Path(script.__file__ or "").read_text().splitlines()
    at = dict(re.findall(r"rank (\d) was at \S+script_of_mine\.py:(\d+) in train", verdict.fault))
    assert "time.sleep(300)" in lines[int(at["1"]) - 1]
    assert at["0"] != at["1"]  # where it waits for rank 1
    assert verdict.diagnosis is not None
    assert verdict.diagnosis.fault == "Processes wait for each other"


def test_an_error_of_one_rank_is_told_with_the_line_of_the_script(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(local_processes.WorkerError) as caught:
        ended(script, "train_raising", 2, tmp_path)
    told = str(caught.value)
    assert told.startswith("rank 1: RuntimeError: the sky fell (script_of_mine.py, line ")
    assert told.endswith('in train_raising: raise RuntimeError("the sky fell"))')


@pytest.mark.slow
def test_an_error_on_one_process_leaves_nothing_to_compare_with(script: ModuleType) -> None:
    with pytest.raises(RunError, match="fails on one process, so nothing was compared") as caught:
        compare(script.train_exiting, quiet=True)
    assert "rank 0: SystemExit: no data here (script_of_mine.py" in str(caught.value)


def test_single_precision_in_a_run_of_double_is_named(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(local_processes.WorkerError) as caught:
        ended(script, "train_from_numpy", 1, tmp_path)
    assert caught.value.fault == "Single precision meets double"
    assert "in forward: torch.from_numpy(np.zeros" in str(caught.value)


def test_a_function_that_returns_no_records_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"train_without_records returned NoneType; return the object from world\.records"
    ):
        ended(script, "train_without_records", 1, tmp_path)


def test_a_comparison_without_a_main_guard_says_so(tmp_path: Path) -> None:
    lines = "from unisono.proof import compare\n\ndef train(world):\n    pass\n\ncompare(train, quiet=True)\n"
    (tmp_path / "bare.py").write_text(lines)
    done = jobs.finished([sys.executable, "bare.py"], cwd=tmp_path)
    assert done.returncode == 1
    assert "ConfigError: unisono.proof.compare starts its own processes" in done.stderr
    assert "`if __name__ == '__main__':`" in done.stderr


class Trainer:
    def train(self, world: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lambda world: None, "a lambda has no name by which other processes could import it"),
        (Trainer().train, r"Trainer\.train is defined inside a function or class"),
        (functools.partial(print), "partial is not defined in a file"),
    ],
)
def test_a_function_that_other_processes_cannot_import_is_refused(train: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(train)


def test_mistakes_are_told_before_a_process_starts(script: ModuleType) -> None:
    for worlds in ([], [1], [2, 0]):
        with pytest.raises(ConfigError, match="one process is compared with 2 or more"):
            compare(script.train, worlds=worlds)
    with pytest.raises(ConfigError, match="precision must be fp64 or fp32, not 'bf16'"):
        compare(script.train, precision="bf16")  # type: ignore[arg-type]
