"""`observe.norms`: the norms of gradients and weights by layer are those of the whole model on every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from packages.unisono.tests import tasks
from packages.unisono.tests.launch import jobs
from unisono.engines import rules

TASK = f"{tasks.__file__}:TransformerTask"
LR = 0.5
WORDS = {
    "train.steps": 5, "train.global_batch": 8, "train.precision": "fp64", "train.clip_norm": 1e-3, "optim": "sgd",
    "optim.lr": LR, "schedules": "constant", "layout.device": "cpu", "layout.threads": 1, "layout.micro_batch": 2,
    "observe.progress": False, "observe.norms": True, "observe.log_every": 2, "checkpoint.every": 1,
    "checkpoint.keep": 9,
}  # fmt: skip


def run(folder: Path, name: str, **layout: Any) -> list[dict[str, Any]]:
    words = WORDS | {"run.dir": folder, "run.name": name} | {f"layout.{key}": value for key, value in layout.items()}
    unisono.train(TASK, [f"{key}={value}" for key, value in words.items()])
    return jobs.events(folder / name)


def norms(event: dict[str, Any], kind: str) -> dict[str, float]:
    return {name.partition("/")[2]: value for name, value in event.items() if name.startswith(f"{kind}/")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("norms")
    return folder, run(folder, "alone", world_size=1)


def test_they_are_recorded_in_the_first_step_and_every_log_every_steps(
    alone: tuple[Path, list[dict[str, Any]]],
) -> None:
    recorded = [event["step"] for event in alone[1] if not event.get("eval") and norms(event, "grad_norm")]
    assert recorded == [1, 2, 4]
    assert norms(alone[1][0], "grad_norm").keys() == norms(alone[1][0], "weight_norm").keys()
    assert {"embedding", "blocks.0.attention.query", "norm"} <= norms(alone[1][0], "grad_norm").keys()


def test_they_are_those_of_the_update_and_of_the_checkpoints(alone: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, events = alone
    kept = {step: weights_after(folder / "alone", step) for step in range(1, 5)}
    for event in (event for event in events if event["step"] in (2, 4) and not event.get("eval")):
        before, after = kept[event["step"] - 1], kept[event["step"]]
        clipped = WORDS["train.clip_norm"] / event["grad_norm"]  # type: ignore[operator]
        names = sorted(before)
        squares = [float(before[name].square().sum()) for name in names]
        updates = [float(((before[name] - after[name]) / (LR * clipped)).square().sum()) for name in names]
        expected = rules.layer_norms(names, updates, squares)
        for layer, norm in norms(event, "grad_norm").items():
            assert norm == pytest.approx(expected[f"grad_norm/{layer}"], rel=1e-4), layer
        assert norms(event, "weight_norm") == pytest.approx(
            {name.partition("/")[2]: value for name, value in expected.items() if name.startswith("weight")}, rel=1e-12
        )
        assert math.hypot(*norms(event, "grad_norm").values()) == pytest.approx(event["grad_norm"], rel=1e-12)


def weights_after(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in (run_folder / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"):
        found |= {name: value for name, value in load_file(file).items() if name.startswith("model/")}
    names = dict(tasks.TransformerTask().build().named_parameters())
    return {name: next(v for key, v in found.items() if key.split("@")[0] == f"model/{name}") for name in names}


@pytest.mark.parametrize(
    "layout",
    [{"world_size": 2, "strategy": "ddp"}, {"world_size": 2, "strategy": "fsdp"},
     {"world_size": 2, "strategy": "hsdp", "shards": 1}, {"world_size": 2, "strategy": "ddp", "reduction": "ordered"}],
    ids=["ddp", "fsdp", "hsdp", "ordered"],
)  # fmt: skip
def test_every_layout_records_what_one_process_does(
    layout: dict[str, Any], alone: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, one = alone
    several = run(folder, "-".join(map(str, layout.values())), **layout)
    for event, other in zip(one, several, strict=True):
        for kind in ("grad_norm", "weight_norm"):
            assert norms(other, kind) == pytest.approx(norms(event, kind), rel=1e-9)


def test_without_the_setting_there_is_nothing_in_the_events_nor_among_the_observers(tmp_path: Path) -> None:
    words = {**WORDS, "observe.norms": False, "train.steps": 1, "run.dir": tmp_path, "run.name": "off"}
    unisono.train(TASK, [f"{key}={value}" for key, value in words.items()])
    assert not any("norm/" in name for event in jobs.events(tmp_path / "off") for name in event)
