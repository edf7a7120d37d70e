"""Losses across samples beside what else a run can have: totals, masked records, compiled blocks, an interruption."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from packages.unisono.tests import processes
from packages.unisono.tests.pairs import FEATURES, WIDTH, Paired
from packages.unisono.tests.runs import ADAMW, SGD, Trace, assert_same, configuration, distance, traces
from tests.proofs import test_resume_is_exact as resume
from tests.proofs.matrix import run_all
from tests.proofs.test_cross_sample import LAYOUTS
from unisono.config.schema.run import RunConfig
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Context, Loss, SampleContext, Task

pytestmark = pytest.mark.slow

CHOSEN = ("single", "single m2", "ddp×2 m4", "fsdp×2 m2", "ddp×4", "hsdp 2×2 m2")


def config(layout: str, rows: str = "stop", **more: Any) -> RunConfig:
    world, keys = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, **keys, **more},
        train={"epochs": 1.0, "global_batch": 16, "precision": "fp64", "clip_norm": 0.5},
        optim=SGD,
        data={"on_error": rows},
    )


class Centred(Paired):
    """Its loss needs the mean embedding of the whole global batch, which a first pass finds."""

    def totals(self, outputs: Any, batch: Any, context: Context) -> dict[str, torch.Tensor]:
        rows = torch.tensor(float(len(batch["x"])))
        return {"views": outputs["views"]["a"].sum(0), "rows": rows}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        if context.training:
            middle = context.totals["views"] / context.totals["rows"]
            views = {name: view - middle.to(view.dtype) for name, view in outputs["views"].items()}
            outputs = {**outputs, "views": views}
        return super().loss(outputs, batch, context)


class Damaged(Paired):
    """Some of its records cannot be made samples."""

    BAD = (3, 11, 12, 30)

    def sample(self, record: Any, context: SampleContext) -> Any:
        if int(record["number"]) in self.BAD:
            raise ValueError("damaged")
        return record


class Blocks(Paired):
    """Its model has blocks, which are compiled one by one."""

    def build(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Sequential(*blocks), nn.Linear(8, WIDTH))


@pytest.fixture(scope="module")
def runs() -> dict[str, Trace]:
    cases: dict[str, tuple[Task, RunConfig]] = {}
    for layout in CHOSEN:
        for loss in ("distance", "whole"):
            cases[f"totals {loss} {layout}"] = Centred(Paired.Config(loss=loss)), config(layout)
            cases[f"masked {loss} {layout}"] = Damaged(Paired.Config(loss=loss)), config(layout, "mask")
    for loss in ("distance", "whole"):
        cases[f"plain {loss}"] = Paired(Paired.Config(loss=loss)), config("single")
    return run_all(cases)


@pytest.mark.parametrize("layout", CHOSEN)
@pytest.mark.parametrize("loss", ["distance", "whole"])
@pytest.mark.parametrize("beside", ["totals", "masked"])
def test_it_is_that_of_one_process(runs: dict[str, Trace], beside: str, loss: str, layout: str) -> None:
    mine, reference = runs[f"{beside} {loss} {layout}"], runs[f"{beside} {loss} single"]
    assert len(set(reference.losses)) == 3
    if not (beside == "totals" and loss == "distance"):  # distances do not know where the middle is
        assert reference.losses[0] != pytest.approx(runs[f"plain {loss}"].losses[0], rel=1e-3), "vacuous"
    if beside == "masked":
        assert sum(step["masked"] for step in reference.metrics) == len(Damaged.BAD)
    assert_same(mine, reference, 1e-12)


def compiled(place: ProcessInfo, group: Communicator, cases: list[tuple[Task, RunConfig]]) -> list[Any]:
    """With a compiler that needs none of C++'s; and how many graphs it was given."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    whole, torch.compile = torch.compile, partial(torch.compile, backend=backend)  # type: ignore[assignment]
    method, nn.Module.compile = nn.Module.compile, partial_compile(backend)  # type: ignore[method-assign]
    try:
        return [traces(place, group, cases), len(graphs)]
    finally:
        torch.compile, nn.Module.compile = whole, method  # type: ignore[assignment,method-assign]


def partial_compile(backend: Any) -> Any:
    whole = nn.Module.compile
    return lambda module, **more: whole(module, backend=backend, **more)


@pytest.mark.parametrize("loss", ["distance", "whole"])
def test_compiled_blocks_give_the_same(loss: str) -> None:
    task = Blocks(Paired.Config(loss=loss))
    (mine,), graphs = processes.run(compiled, 2, [(task, config("ddp×2 m4", compile=True))])[0]
    reference = processes.alone(traces, [(task, config("single"))])[0]
    assert graphs, "nothing was compiled"
    assert mine.losses == pytest.approx(reference.losses, rel=1e-12)
    assert max(distance(mine.parameters, reference.parameters).values()) < 1e-12


@pytest.mark.parametrize("layout", ["ddp×2 m4", "fsdp×2 m2"])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path, layout: str) -> None:
    runs: list[tuple[Any, Path, int | None]] = []
    tasks: list[Task] = []
    world, keys = LAYOUTS[layout]
    for loss in ("contrast", "whole"):
        asked = configuration(
            layout={"world_size": world, **keys},
            train={"steps": 6, "global_batch": 16, "precision": "fp32"},
            optim=ADAMW,
            checkpoint={"every": 2},
            observe={"progress": False},
            eval={"every": 3, "micro_batch": 3},
        )
        runs += [
            (asked, tmp_path / f"{loss} {part}", until) for part, until in (("whole", None), ("cut", 5), ("cut", None))
        ]
        tasks += [Paired(Paired.Config(loss=loss, dropout=0.25))] * 3
    processes.run(resume.train, world, runs, tasks)
    for loss in ("contrast", "whole"):
        whole, cut = tmp_path / f"{loss} whole", tmp_path / f"{loss} cut"
        mine, reference = resume.final(cut, 6), resume.final(whole, 6)
        assert mine.keys() == reference.keys()
        assert all(np.array_equal(mine[name], value) for name, value in reference.items())
        assert resume.events(cut) == resume.events(whole)
        assert len({event["loss"] for event in resume.events(whole)}) > 6
