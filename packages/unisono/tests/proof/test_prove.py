"""`unisono prove` from the command line, on real processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs

TASK = '''
import os, time
import numpy as np, torch, unisono

class Good(unisono.Task):
    def data(self):
        rng = np.random.default_rng(0)
        return [{"x": x.astype(np.float32)} for x in rng.normal(size=(40, 3))]

    def held_out(self):
        return self.data()[:7]

    def build(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def counts(self, batch):
        return {"square": float((batch["x"][:, 0] > 0).sum())}

    def outputs(self, model, batch, context):
        return model(batch["x"])[:, 0]

    def loss(self, outputs, batch, context):
        wanted = batch["x"][:, 0] > 0
        return unisono.Loss({"square": ((outputs - batch["x"].sum(1)).square() * wanted).sum()})

class MeanOfMeans(Good):
    """Divides in the loss what counts() should divide."""

    def counts(self, batch):
        return {"square": 1.0}

    def loss(self, outputs, batch, context):
        wanted = batch["x"][:, 0] > 0
        squares = (outputs - batch["x"].sum(1)).square() * wanted
        return unisono.Loss({"square": squares.sum() / max(1, int(wanted.sum()))})

class Across(Good):
    """Looks across the rows of a micro-batch."""

    def outputs(self, model, batch, context):
        found = model(batch["x"])[:, 0]
        return found + 0.1 * found.mean()

class Typo(Good):
    def loss(self, outputs, batch, context):
        return unisono.Loss({"square": batch["z"].sum()})

class NoData(Good):
    def data(self):
        return self.nothing

class OneRankRaises(Good):
    def outputs(self, model, batch, context):
        if os.environ["RANK"] == "1":
            raise KeyError("label")
        return super().outputs(model, batch, context)

class SetOrder(Good):
    """Reads its rows in the order of a set of strings, which every start of Python makes anew."""

    def data(self):
        rows = {f"row {number}": row for number, row in enumerate(super().data())}
        return [rows[name] for name in set(rows)]

class HashedSplit(Good):
    """Keeps half of its rows or more, as a hash says: two starts keep as many once in a thousand times.

    The first steps may have the same rows of both.
    """

    def data(self):
        return (super().data() * 50)[: 1000 + hash("rows") % 997]

class HashedStart(Good):
    def build(self):
        model = super().build()
        torch.nn.init.constant_(model[2].bias, hash("bias") % 997 / 997)
        return model

class OneRankAddsNothing(Good):
    def outputs(self, model, batch, context):
        found = super().outputs(model, batch, context)
        return found.detach() + 0 * found if os.environ["RANK"] == "1" else found

class ReducedTwice(Good):
    def build(self):
        model = super().build()
        def again(gradient):
            if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                gradient = gradient.clone()
                torch.distributed.all_reduce(gradient)
            return gradient
        model[2].bias.register_hook(again)
        return model

class WithBuffer(Good):
    """Adds a fixed number, which is nobody's parameter."""

    def seed(self):
        return 0

    def build(self):
        model = super().build()
        generator = torch.Generator().manual_seed(self.seed())
        model.register_buffer("shift", torch.randn(1, generator=generator))
        return model

    def outputs(self, model, batch, context):
        return super().outputs(model, batch, context) + model.shift

class ClockBuffer(WithBuffer):
    def seed(self):
        return time.time_ns()

class RankBuffer(WithBuffer):
    def seed(self):
        return int(os.environ["RANK"])

class CountsCalls(Good):
    """Halves the loss from the seventh call on, which no layout makes in the same step."""

    calls = 0

    def loss(self, outputs, batch, context):
        self.calls += context.training
        wanted = batch["x"][:, 0] > 0
        squares = (outputs - batch["x"].sum(1)).square() * wanted
        return unisono.Loss({"square": squares.sum() * (0.5 if self.calls > 6 else 1)})

class FirstRows(torch.nn.Module):
    """A scale that the first rows decide."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x):
        if not self.scale.any():
            self.scale.data = 1 / x.std(0)
        return x * self.scale

class ScaledByFirstRows(Good):
    def build(self):
        return torch.nn.Sequential(FirstRows(), torch.nn.Linear(3, 1))

class OneRankHangs(Good):
    def outputs(self, model, batch, context):
        if os.environ["RANK"] == "1":
            time.sleep(600)
        return super().outputs(model, batch, context)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prove")
    (path / "task.py").write_text(TASK)
    return path


def prove(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return jobs.unisono("prove", *words, cwd=folder, timeout=400)


@pytest.mark.slow
def test_a_right_task_passes_and_leaves_a_certificate(folder: Path) -> None:
    done = prove(folder, "task.py:Good", "run.name=good", "layouts=[ddp:2,fsdp:2]")
    assert done.returncode == 0, done.stdout + done.stderr
    held = json.loads((folder / "runs" / "good" / "certificate.json").read_text())
    assert held["verdict"] == "PASS"
    compared = {c["quantity"] for case in held["cases"] for c in case["compared"] if c["mark"] == "PASS"}
    assert {"raw gradients", "parameters", "evaluation"} <= compared
    assert "PASS; certificate:" in done.stderr
    assert jobs.unisono("train", "task.py:Good", "run.name=good", "train.steps=2", cwd=folder).returncode == 0


@pytest.mark.slow
def test_a_mean_of_means_is_found_and_named(folder: Path) -> None:
    done = prove(folder, "task.py:MeanOfMeans", "layouts=[ddp:2]", "vary=[accumulate]", "precisions=[fp64]")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "single m1 fp64: FAIL loss" in done.stdout
    assert "likely: A mean of means" in done.stdout
    assert "more: unisono explain a-mean-of-means" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("ClockBuffer", r"'shift' other values the second time\n  likely: Initialisation depends on the call"),
        (
            "RankBuffer",
            r"FAIL initial parameters: 'shift' is not the same.*\n  likely: Initialisation depends on the rank",
        ),
        (
            "CountsCalls",
            r"FAIL loss: step 1.*\n  likely: The loss depends on the process .*passes change self\.calls"
            r"[^=]*\n  also: ddp:2 m4 fp64 \(loss, step 3\)",
        ),
        ("ScaledByFirstRows", r"likely: The forward pass changes parameters \(the first pass alone.*0\.scale"),
        ("SetOrder", r"FAIL samples: step 1.*\n  likely: The samples depend on the process \("),
        ("HashedSplit", r"FAIL sample ids.*\n  likely: The samples depend on the process \(data\(\) has \d+ rows"),
        ("HashedStart", r"FAIL initial parameters: 2\.bias.*\n  likely: Initialisation depends on the layout \("),
        (
            "OneRankAddsNothing",
            r"FAIL raw gradients.*\n  likely: Gradients are those of a part of the batch \(.*rows of rank 0 alone",
        ),
        ("ReducedTwice", r"\(only 2\.bias differ, 2 times what they should be \(the number of processes"),
    ],
)
def test_what_another_process_does_otherwise_is_found(
    folder: Path, task: str, text: str, real_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases of one and of several processes have other hash seeds, as two starts of Python have."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    layout = "fsdp:2" if task == "RankBuffer" else "ddp:2"  # DDP sends the buffers of rank 0 to all
    words = (f"layouts=[{layout}]", "vary=[accumulate]" if task == "CountsCalls" else "vary=[]", "precisions=[fp64]")
    done = prove(folder, f"task.py:{task}", *words, "steps=3")
    assert done.returncode == 1
    said = re.sub(r"^  made by: .*\n", "", done.stdout, flags=re.MULTILINE)
    assert re.search(text, said), said


@pytest.mark.slow
def test_no_certificate_covers_micro_batches_that_were_not_compared(folder: Path) -> None:
    words = ("task.py:Across", "run.name=across", "train.steps=2", "train.global_batch=8")
    meant = ("precisions=[fp32]", "accept=[neighbours]")
    done = prove(folder, *words, "layouts=[ddp:2]", "vary=[accumulate]", *meant)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS; not judged: single m1 fp32 against single m4 fp32; certificate: " in done.stderr
    two = ("layout.world_size=2", "--proved")
    done = jobs.unisono("train", *words, "layout.micro_batch=2", *two, cwd=folder)
    assert done.returncode == 2
    assert "no case of ddp with several micro-batches on cpu passed in it" in done.stderr
    assert "single m1 fp32 abstained: what the model computes for a row depends on the other rows" in done.stderr
    done = jobs.unisono("train", *words, *two, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "covers ddp in fp32 on cpu, without resuming, for one micro-batch size only" in done.stdout


@pytest.mark.slow
def test_the_certificate_can_be_printed(folder: Path) -> None:
    done = prove(folder, "task.py:Good", "layouts=[ddp:2]", "vary=[]", "precisions=[fp64]", "--json")
    assert json.loads(done.stdout)["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layouts=[tp:2]"], "layouts: 'tp:2' is not a layout"),
        (["layouts=[ddp:3]"], "divide global_batch=8"),
        (["vary=[speed]"], "vary: "),
        (["optim.lrr=1"], "unknown key 'optim.lrr'"),
    ],
)
def test_a_mistake_is_told_before_a_process_starts(folder: Path, words: list[str], message: str) -> None:
    done = prove(folder, "task.py:Good", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not any(line.startswith("1 process") for line in done.stderr.splitlines())


# errors of the task -------------------------------------------------------------------------------------------------

ONE_CASE = ("layouts=[ddp:2]", "vary=[]", "precisions=[fp64]")


def test_an_error_in_the_data_shows_the_lines_of_the_task_alone(folder: Path) -> None:
    done = prove(folder, "task.py:NoData", *ONE_CASE)
    assert done.returncode == 2
    assert done.stderr.startswith("unisono: error: AttributeError: 'NoData' object has no attribute 'nothing'\n")
    assert frames(done.stderr) == ["task.py data"]


@pytest.mark.slow
def test_an_error_on_one_process_ends_the_proof_with_the_lines_of_the_task_alone(folder: Path) -> None:
    done = prove(folder, "task.py:Typo", "run.name=typo", *ONE_CASE)
    assert done.returncode == 2
    assert "error: the task fails on one process, so there is nothing to compare:\nKeyError: 'z'\n" in done.stderr
    assert frames(done.stderr) == ["task.py loss"]
    assert "2 processes" not in done.stderr
    assert not (folder / "runs" / "typo").exists()


@pytest.mark.slow
def test_an_error_of_one_rank_is_a_failure_whose_logs_are_kept(folder: Path) -> None:
    done = prove(folder, "task.py:OneRankRaises", *ONE_CASE)
    assert done.returncode == 1, done.stderr
    assert "ddp:2 m4 fp64: FAIL the run: rank 1: KeyError: 'label'\n" in done.stdout
    assert frames(done.stdout) == ["task.py outputs"]
    kept = kept_logs(done.stdout)
    assert "KeyError" in (kept / "rank-00001.fault.json").read_text()
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]  # the traces are gone
    shutil.rmtree(kept.parent)


@pytest.mark.slow
def test_a_task_that_hangs_is_ended_early_with_the_line_of_every_rank(folder: Path) -> None:
    began = time.monotonic()
    done = prove(folder, "task.py:OneRankHangs", *ONE_CASE)
    assert done.returncode == 1, done.stderr
    assert time.monotonic() - began < 300
    assert "ddp:2 m4 fp64: FAIL the run: it hung" in done.stdout
    assert re.search(r"rank 0 was at .*:\d+ in ", done.stdout)
    assert re.search(r"rank 1 was at .*task\.py:\d+ in outputs", done.stdout)
    assert "likely: Processes wait for each other" in done.stdout
    kept = kept_logs(done.stdout)
    assert {"rank-00000.stack", "rank-00001.stack"} <= {path.name for path in kept.iterdir()}
    shutil.rmtree(kept.parent)


EDITED = """
import other
from task import Good

class Task(Good):
    def build(self):
        with open(other.__file__, "a") as file:
            print("# an edit", file=file)
        return super().build()
"""


@pytest.mark.slow
def test_code_that_is_edited_meanwhile_ends_the_proof_before_the_next_case(folder: Path) -> None:
    (folder / "edited.py").write_text(EDITED)
    (folder / "other.py").write_text("")
    done = prove(folder, "edited.py:Task", *ONE_CASE)
    assert done.returncode == 2
    assert "the code changed during the proof: other.py has changed. Start the proof again" in done.stderr
    assert "(1 of " in done.stderr and "(3 of " not in done.stderr


def frames(told: str) -> list[str]:
    """File and function of every frame that is shown."""
    found = re.findall(r'File "(.*)", line \d+, in (\w+)', told)
    return [f"{Path(file).name} {function}" for file, function in found]


def kept_logs(told: str) -> Path:
    """The folder of logs that a failure names."""
    named = re.search(r"^  logs: (.+)$", told, re.MULTILINE)
    assert named, told
    return Path(named[1])
