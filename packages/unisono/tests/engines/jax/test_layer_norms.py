"""`observe.norms` in JAX: the norms of gradients and weights by layer, the same for every number of devices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file

import unisono
from packages.unisono.tests import jax_tasks
from packages.unisono.tests.launch import jobs
from unisono.engines import rules

TASK = f"{jax_tasks.__file__}:TransformerTask"
WORDS = {
    "train.steps": 3, "train.global_batch": 8, "train.precision": "fp64", "layout.device": "cpu", "layout.threads": 1,
    "layout.micro_batch": 2, "observe.progress": False, "observe.norms": True, "observe.log_every": 3,
    "checkpoint.every": 1, "checkpoint.keep": 9,
}  # fmt: skip


def run(folder: Path, name: str, **more: Any) -> list[dict[str, Any]]:
    words = WORDS | {"run.dir": folder, "run.name": name} | {key.replace("__", "."): v for key, v in more.items()}
    unisono.train(TASK, [f"{key}={value}" for key, value in words.items()])
    return [event for event in jobs.events(folder / name) if not event.get("eval")]


def norms(event: dict[str, Any], kind: str) -> dict[str, float]:
    return {name.partition("/")[2]: value for name, value in event.items() if name.startswith(f"{kind}/")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    jax.devices()  # as many as the tests ask for, before a run asks for one
    folder = tmp_path_factory.mktemp("norms")
    return folder, run(folder, "alone", layout__devices=1)


def test_they_add_up_to_the_norm_of_the_gradient_and_are_those_of_the_checkpoint(
    alone: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, (first, second, third) = alone
    assert len(norms(first, "grad_norm")) > 4 and not norms(second, "grad_norm")
    for event in (first, third):
        assert math.hypot(*norms(event, "grad_norm").values()) == pytest.approx(event["grad_norm"], rel=1e-12)
    weights = {}
    for file in (folder / "alone" / "checkpoints" / "step-00000002").glob("*.safetensors"):
        weights |= {name.split("@")[0]: value for name, value in load_file(file).items()}
    own = {name.removeprefix("model/"): value for name, value in weights.items() if name.startswith("model/")}
    squares = [float((own[name] ** 2).sum()) for name in sorted(own)]
    expected = rules.layer_norms(sorted(own), squares, squares)
    for layer, norm in norms(third, "weight_norm").items():
        assert norm == pytest.approx(expected[f"weight_norm/{layer}"], rel=1e-12), layer


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_devices_record_what_one_does(strategy: str, alone: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, one = alone
    for event, other in zip(one, run(folder, strategy, layout__devices=2, layout__strategy=strategy), strict=True):
        for kind in ("grad_norm", "weight_norm"):
            assert norms(other, kind) == pytest.approx(norms(event, kind), rel=1e-9)


def test_without_the_setting_there_is_nothing_in_the_events(tmp_path: Path) -> None:
    (event, *_) = run(tmp_path, "off", layout__devices=1, observe__norms=False, train__steps=1)
    assert not any("norm/" in name for name in event)
