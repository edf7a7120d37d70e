"""Gradients are added up in fp32 under bf16: over micro-batches, and over processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from packages.unisono.tests import processes
from packages.unisono.tests.runs import FirstGradients, configuration, started
from packages.unisono.tests.tasks import TransformerTask
from unisono.engines.torch.numerics import gradients
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp×2": (2, {"strategy": "ddp"}),
    "fsdp×2": (2, {"strategy": "fsdp"}),
    "fsdp×2 deferred": (2, {"strategy": "fsdp", "defer_reduction": True}),
    "hsdp 2×2": (4, {"strategy": "hsdp", "shards": 2}),
}


class Adding(FirstGradients):
    """Adds up the gradient of each pass on the side, in fp64 and in bf16."""

    def __init__(self, view: Any, module: torch.nn.Module, factor: float) -> None:
        super().__init__(view)
        self.module, self.factor = module, factor  # that the loss was multiplied by

    def on_step_begin(self, step: int, batches: Any) -> None:
        self.passes = 0
        self.exact: dict[str, torch.Tensor] = {}
        self.low: dict[str, torch.Tensor] = {}
        self.seen: set[str] = set()

    def part(self, name: str) -> Any:
        if name == "forward":
            self.seen.clear()
        return gradients.local_gradients(self.module, self.see) if name == "passes" else None

    def see(self, name: str, gradient: torch.Tensor) -> None:
        if name in self.seen:  # every forward pass watches the same parameters once more
            return
        self.seen.add(name)
        self.passes += name == "model.norm.weight"
        for sums, dtype in ((self.exact, torch.float64), (self.low, torch.bfloat16)):
            sums[name] = sums.get(name, torch.zeros((), dtype=dtype)) + gradient.detach().to(dtype) / self.factor


def added(
    place: ProcessInfo, group: Communicator, layouts: list[str]
) -> dict[str, tuple[int, dict[str, list[np.ndarray]]]]:
    """By layout the passes of this process, and of every parameter the gradient, its sum in fp64, its sum in bf16."""
    found = {}
    for layout in layouts:
        task = TransformerTask()
        settings = {"world_size": place.world_size, "micro_batch": 1, **LAYOUTS[layout][1]}
        config = configuration(layout=settings, train={"precision": "bf16", "steps": 1, "clip_norm": None})
        engine, (batches,) = started(place, group, task, config)
        try:
            factor = place.world_size if config.layout.strategy == "ddp" else 1
            adding = Adding(engine.view, engine.train_state.parallel.module, factor)
            engine.observe(adding)
            engine.step(batches, 0, {"lr": 0.1})
            sums = {}
            for name, gradient in adding.raw.items():
                exact, low = adding.exact[f"model.{name}"], adding.low[f"model.{name}"].double()
                if place.world_size > 1:
                    dist.all_reduce(exact)
                    dist.all_reduce(low)
                sums[name] = [gradient, exact.numpy(), low.numpy()]
            found[layout] = (adding.passes, sums)
        finally:
            engine.close()
    return found


def reduced(place: ProcessInfo, group: Communicator, micro_batch: int, broken: bool) -> list[int]:
    """The sizes of the tensors of floating-point numbers that one update of DDP reduces, the small ones left out."""
    task = TransformerTask()
    settings = {"world_size": place.world_size, "micro_batch": micro_batch, "strategy": "ddp"}
    config = configuration(layout=settings, train={"steps": 2})
    engine, (first, second) = started(place, group, task, config)
    try:
        engine.step(first, 0, {"lr": 0.1})  # DDP orders its buckets anew after it
        if broken:
            engine.train_state.parallel.wrapped.no_sync = nullcontext
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            engine.step(second, 1, {"lr": 0.1})
    finally:
        engine.close()
    calls = [event for event in seen.events() if event.name == "gloo:all_reduce"]
    sizes = [sum(int(np.prod(shape)) for shape in call.input_shapes if shape) for call in calls]
    return [size for size in sizes if size > 1000]


@pytest.mark.slow
def test_gradients_are_reduced_once_an_update_however_many_micro_batches() -> None:
    (once, _), (often, _) = (processes.run(reduced, 2, micro_batch, False) for micro_batch in (6, 1))
    assert once == often and sum(once) > 1000
    wrong, _ = processes.run(reduced, 2, 1, True)
    assert len(wrong) == 6 * len(once), "what is counted would show a reduction of each micro-batch"


@pytest.fixture(scope="module")
def everyone() -> dict[str, tuple[int, dict[str, list[np.ndarray]]]]:
    found = processes.alone(added, ["single"])
    for world in (2, 4):
        found |= processes.run(added, world, [name for name, (size, _) in LAYOUTS.items() if size == world])[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_added_up_in_fp32_under_bf16(everyone: Any, layout: str) -> None:
    passes, sums = everyone[layout]
    assert passes == 12 // LAYOUTS[layout][0]
    assert all(gradient.dtype == np.float32 for gradient, _, _ in sums.values())

    def off(which: int) -> float:
        apart = sum(float(np.square(parts[which] - parts[1], dtype=np.float64).sum()) for parts in sums.values())
        return float(np.sqrt(apart / sum(float(np.square(exact).sum()) for _, exact, _ in sums.values())))

    assert off(2) > 1e-3, "sums in bf16 would not have been seen"
    assert off(0) < 1e-6
