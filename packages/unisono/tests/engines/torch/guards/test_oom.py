"""Out of memory ends a run with a sentence and its exit code, wherever in a step it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.runs import configuration, trace
from packages.unisono.tests.tasks import LinearTask
from unisono.runtime.errors import MemoryExhaustedError
from unisono.task import Context

TOLD = "CUDA out of memory. Tried to allocate 2.00 GiB"


class Short(LinearTask):
    """In its third step there is no memory left, in one pass or the other; or in an evaluation."""

    class Config(LinearTask.Config):
        part: str = "forward"
        rank: int | None = None

    config: Config

    def held_out(self) -> Any:
        return self.data()[:4]

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        import os

        mine, evaluated = self.config.rank in (None, int(os.environ.get("RANK", "0"))), self.config.part == "evaluation"
        due = mine and evaluated is not context.training and (evaluated or context.step == 2)
        if due and self.config.part in ("forward", "evaluation"):
            raise torch.OutOfMemoryError(TOLD + "\nand some lines more")
        outputs = super().outputs(model, batch, context)
        if due and self.config.part == "backward":
            outputs.register_hook(self._fail)
        return outputs

    @staticmethod
    def _fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def short(part: str, micro: int = 6) -> None:
    config = configuration(layout={"micro_batch": micro}, train={"steps": 4})
    processes.alone(trace, Short(Short.Config(part=part)), config)


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("forward", rf"rank 0, step 3: out of memory with 6 rows in a micro-batch \({TOLD}\)"),
        ("backward", r"rank 0, step 3: out of memory with 6 rows .*you tried to allocate 8 bytes"),
        ("evaluation", r"rank 0, evaluation after step 4: out of memory"),
    ],
)
def test_it_is_said_where_memory_ended_and_which_micro_batches_are_smaller(part: str, where: str) -> None:
    advice = r".* Use a smaller layout.micro_batch \(1, 2, 3, 4\), or let `unisono autobatch` find the largest"
    with pytest.raises(MemoryExhaustedError, match=where + advice):
        short(part)


def test_where_one_row_is_too_much_other_advice_is_given() -> None:
    with pytest.raises(MemoryExhaustedError, match=r"1 row in a micro-batch .*There is no smaller layout.micro_batch"):
        short("forward", micro=1)


def test_a_rank_that_runs_out_ends_the_run_with_its_exit_code(tmp_path: Path) -> None:
    words = [
        "train.steps=4", "train.global_batch=12", "observe.progress=false", "layout.threads=1", "layout.device=cpu",
        "layout.world_size=2", "layout.strategy=ddp", "run.name=a", "task.rank=1",
    ]  # fmt: skip
    ended = jobs.unisono("train", f"{__file__}:Short", *words, cwd=tmp_path)
    assert ended.returncode == MemoryExhaustedError.exit_code == 6, ended.stderr
    assert "rank 1, step 3: out of memory with 6 rows in a micro-batch" in ended.stderr
    assert [event["step"] for event in jobs.events(tmp_path / "runs" / "a")] == [1, 2]
