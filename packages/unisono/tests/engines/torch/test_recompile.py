"""What torch.compile compiles again in a warm run: nothing while shapes stay; else it is told, with the reason."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration, logged, prepared
from packages.unisono.tests.tasks import TransformerTask
from unisono.engines.observers import StepResult
from unisono.engines.torch.guards.recompile_guard import RecompileGuard
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.display import compiling

pytestmark = pytest.mark.slow


class Growing(TransformerTask):
    """The third step's rows are shorter on the last rank, or those of no step."""

    class Config(TransformerTask.Config):
        shorter: bool = False

    config: Config

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        last = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 1
        short = self.config.shorter and last and context.step == 2 and context.training
        return super().outputs(model, {**batch, "tokens": batch["tokens"][:, :8]} if short else batch, context)

    def loss(self, outputs: Any, batch: Any, context: Any) -> Any:
        return super().loss(outputs, {**batch, "tokens": batch["tokens"][:, : outputs.shape[1] + 1]}, context)


def results(
    place: ProcessInfo, group: Communicator, strategy: str, shorter: bool
) -> tuple[list[StepResult], list[str]]:
    """Five compiled steps, an evaluation in their middle, and the warnings of this rank."""
    torch._dynamo.reset()
    task = Growing(Growing.Config(shorter=shorter))
    layout = {"strategy": strategy, "world_size": place.world_size, "compile": True, "micro_batch": 3}
    config = configuration(layout=layout, train={"steps": 5, "global_batch": 12, "guard_every": 2})
    engine, steps = prepared(place, group, task, config)
    done = []
    try:
        with logged() as said:
            engine.setup(steps[0], {"lr": 0.1})
            for step, batches in enumerate(steps):
                done.append(engine.step(batches, step, {"lr": 0.1}))
                if step == 1:
                    engine.evaluate([batches], step, {"lr": 0.1})
    finally:
        engine.close()
    assert len({result.loss for result in done}) == 5
    assert np.isfinite([result.loss for result in done]).all()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    return done, said


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_with_static_shapes_nothing_is_compiled_after_the_warm_up(strategy: str) -> None:
    for done, said in processes.ranks(results, 1 if strategy == "single" else 2, strategy, False):
        assert [result.recompiled for result in done] == [""] * 5
        assert not any("recompiled" in line for line in said)


@pytest.mark.parametrize("world", [1, 2])
def test_a_shape_that_changes_is_told_once_with_its_reason_on_every_rank(world: int) -> None:
    for done, said in processes.ranks(results, world, "single" if world == 1 else "ddp", True):
        assert [bool(result.recompiled) for result in done] == [False, False, True, False, False]
        told = done[2].recompiled
        assert f"rank {world - 1}, forward (tasks.py:" in told
        assert "size mismatch at index 1. expected 12, actual 7" in told
        assert "rank 0" not in told or world == 1
        (warning,) = [line for line in said if "recompiled" in line]
        assert warning.startswith("step 3: torch.compile recompiled after the warm-up")
        assert told in warning


def test_what_the_start_of_a_run_compiles_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "FIRST_REPORT", 0.1)
    results(ProcessInfo(), SingleProcess(), "single", False)
    assert re.search(r"^unisono: compiling 2 × Block: 0 s so far$", capsys.readouterr().err, re.MULTILINE)


def test_without_a_compiler_there_is_nothing_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    guard = RecompileGuard(SingleProcess())
    guard.on_step_begin(0, [])
    assert guard.compilations() == []
