"""What tests of this package share: small traced steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unisono.config.schema.run import RunConfig
from unisono.launch.model.check import first_micro_batch
from unisono.task import run_setup
from unisono.task_config import build_task, load_config
from unisono_plan.recording import Trace
from unisono_plan.torch_trace import trace_torch_step

TASK = f"{Path(__file__).with_name('zoo') / 'small.py'}:SmallTask"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lay_out(config: RunConfig, rows: int, **layout: Any) -> RunConfig:
    kind, train = type(config.layout), config.train.model_copy(update={"global_batch": rows})
    values = {**config.layout.model_dump(), "engine": "torch", "device": "cpu", "devices": 1, **layout}
    return config.model_copy(update={"layout": kind.model_validate(values), "train": train})


def trace(*words: str, recipe: str = TASK, rows: int = 4, passes: int = 1, leave_out: str = "", **layout: Any) -> Trace:
    """A step of the small task, or of a recipe."""
    if "adapter=lora" in words:
        pytest.importorskip("peft", reason="adapter=lora needs peft")
    config = load_config(recipe, ["optim=adamw", *words])[0]
    alone = lay_out(config, rows, world_size=1, strategy="single", micro_batch=rows)
    task = build_task(alone)
    run_setup(task)
    micro = first_micro_batch(task, alone)
    micro.arrays.pop(leave_out, None)
    world = layout.setdefault("world_size", 1)
    layout.setdefault("strategy", "single" if world == 1 else "fsdp")
    return trace_torch_step(task, lay_out(config, rows * passes * world, **layout), micro, passes)
