"""A step that runs out of memory is made again with smaller micro-batches, where that is the same step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import unisono
from tests.launch import jobs
from tests.tasks import LinearTask
from unisono.runtime.errors import MemoryExhaustedError
from unisono.task import Context

WORDS = {
    "train.steps": 4, "train.global_batch": 12, "train.precision": "fp64", "observe.progress": False,
    "layout.threads": 1, "layout.device": "cpu", "run.name": "a", "optim.lr": 0.01,
}  # fmt: skip


class Short(LinearTask):
    """From its third step on, no memory for more than four rows: the second micro-batch is refused, not the first."""

    class Config(LinearTask.Config):
        most: int = 4
        dropout: float = 0.0
        counting: bool = False
        rank: int | None = None

    config: Config
    passes = 0

    def build(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(self.config.dropout), nn.Linear(8, 1))
        model.register_buffer("seen", torch.zeros(()))
        return model

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        rows = len(batch["x"])
        Short.passes = Short.passes + 1 if rows > self.config.most else 0
        mine = self.config.rank in (None, int(os.environ.get("RANK", "0")))
        if mine and context.step >= 2 and rows > self.config.most and Short.passes % 2 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.config.counting:
            model.seen += 1
        return model(batch["x"])


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Short, "passes", 0)
    return tmp_path


def trained(**words: Any) -> list[dict[str, Any]]:
    given = {**WORDS, **{name.replace("__", "."): value for name, value in words.items()}}
    unisono.train(Short, given)
    return [event for event in jobs.events(Path("runs") / given["run.name"]) if not event.get("eval")]


def test_the_step_is_made_again_and_nothing_is_changed_by_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = trained(layout__micro_batch=6)
    assert "out of memory with 6 rows in a micro-batch; the step is made again with 4" in capsys.readouterr().err
    reference = trained(layout__micro_batch=4, run__name="b")
    assert [event["step"] for event in mine] == [1, 2, 3, 4]
    assert len({event["loss"] for event in mine}) == 4
    for name in ("loss", "grad_norm"):
        assert [event[name] for event in mine] == pytest.approx([event[name] for event in reference], rel=1e-12)
    frozen = yaml.safe_load((here / "runs" / "a" / "config.yaml").read_text())
    assert frozen["layout"]["micro_batch"] == 4, "a resumed run keeps what fits"
    before = yaml.safe_load((here / "runs" / "a" / "config.0001.yaml").read_text())
    assert before == {**frozen, "layout": {**frozen["layout"], "micro_batch": 6}}, "what it was is kept"


def test_another_micro_batch_is_not_taken_where_it_would_be_another_run() -> None:
    with pytest.raises(MemoryExhaustedError, match="draws random numbers"):
        trained(layout__micro_batch=6, task__dropout=0.5)
    allowed = {"run__allow_change": ["layout.micro_batch"], "run__name": "b"}
    assert len(trained(layout__micro_batch=6, task__dropout=0.5, **allowed)) == 4


def test_a_step_that_has_changed_a_buffer_is_not_made_again() -> None:
    with pytest.raises(MemoryExhaustedError, match=r"step 3: out of memory with 6 rows.*a smaller .* \(1, 2, 3, 4\)"):
        trained(layout__micro_batch=6, task__counting=True)


def test_memory_that_one_row_does_not_fit_ends_the_run() -> None:
    with pytest.raises(MemoryExhaustedError, match="there is none"):
        trained(layout__micro_batch=1, task__most=0)


def test_under_fsdp_one_that_runs_out_ends_the_run_which_goes_on_with_less(here: Path) -> None:
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in WORDS.items()]
    words += ["layout.world_size=2", "layout.strategy=fsdp", "task.rank=1", "checkpoint.every=1"]
    told = jobs.unisono("train", f"{__file__}:Short", *words, cwd=here)
    assert told.returncode == 6, told.stderr
    assert "rank 1, step 4: out of memory with 6 rows in a micro-batch" in told.stderr
    assert "it goes on from its newest checkpoint" in told.stderr
    frozen = here / "runs" / "a" / "config.yaml"
    assert yaml.safe_load(frozen.read_text())["layout"]["micro_batch"] == 3
    assert yaml.safe_load(frozen.with_name("config.0001.yaml").read_text())["layout"]["micro_batch"] == 6
    assert [event["step"] for event in jobs.events(here / "runs" / "a")] == [1, 2, 3]
    losses = [event["loss"] for event in trained(task__rank=1, checkpoint__every=1)]  # alone now, and from step 3
    reference = [event["loss"] for event in trained(task__rank=1, run__name="b")]
    assert yaml.safe_load(frozen.read_text())["layout"]["micro_batch"] == 3, "what is left to choose stays frozen"
    assert losses == pytest.approx(reference, rel=1e-12)
    assert len(set(losses)) == 4


def test_under_fsdp_a_run_that_may_be_restarted_goes_on_by_itself(here: Path) -> None:
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in WORDS.items()]
    words += ["layout.world_size=2", "layout.strategy=fsdp", "task.rank=1", "checkpoint.every=1"]
    told = jobs.unisono("train", f"{__file__}:Short", *words, "launch.max_restarts=1", cwd=here)
    assert told.returncode == 0, told.stderr
    assert "starting all processes again, from the checkpoint of step 3 (attempt 1 of 1" in told.stderr
    folder = here / "runs" / "a"
    assert yaml.safe_load((folder / "config.yaml").read_text())["layout"]["micro_batch"] == 3
    losses = [event["loss"] for event in jobs.events(folder) if "loss" in event]
    reference = [event["loss"] for event in trained(task__rank=1, run__name="b")]
    assert losses == pytest.approx(reference, rel=1e-12)
    assert len(set(losses)) == 4
