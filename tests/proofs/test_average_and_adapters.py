"""A moving average of the weights, and adapters beside a frozen base: those of one process, and the same on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.layouts import LAYOUTS
from packages.unisono.tests.runs import ADAMW, SGD, Trace, assert_same, configuration, distance, without_gradient
from tests.proofs import matrix, test_resume_is_exact
from tests.proofs.matrix import MODELS, TOLERANCE
from tests.proofs.test_resume_is_exact import INTERRUPTED, STEPS, _go, _moved, events, final

pytestmark = pytest.mark.slow

LORA = {"kind": "lora", "rank": 3, "alpha": 6.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "average": {"ema": {"decay": 0.6, "start": 2, "every": 2}},
    "adapters": {"adapter": LORA},
    "adapters with dropout, and their average": {"adapter": {**LORA, "dropout": 0.25}, "ema": {"decay": 0.6}},
}
CASES = [
    (model, variant, precision, layout)
    for model in MODELS
    for variant in VARIANTS
    for precision in TOLERANCE
    for layout in ("ddp×2 m3", "fsdp×2 m3", "hsdp 2×2 m3")
    if precision == "fp64" or layout == "fsdp×2 m3"
]
REFERENCES = [(*case, "single m3") for case in dict.fromkeys(case[:3] for case in CASES)]
Case = tuple[str, str, str, str]


def _config(case: Case, rows: int) -> Any:
    _, variant, precision, layout = case
    world, settings = LAYOUTS[layout]
    return configuration(
        layout={"world_size": world, **settings},
        train={"epochs": matrix.ROWS / rows, "precision": precision, "guard_every": 3, "clip_norm": 0.5},
        optim=SGD,
        eval={"micro_batch": 4},
        **VARIANTS[variant],
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Trace]:
    folder = tmp_path_factory.mktemp("matrix")
    tasks = {model: matrix._task(model, 0.0, folder) for model in MODELS}
    rows = {model: len(task.data()) for model, task in tasks.items()}
    return matrix.run_all({case: (tasks[case[0]], _config(case, rows[case[0]])) for case in (*REFERENCES, *CASES)})


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_layout_equals_one_process(runs: dict[Case, Trace], case: Case) -> None:
    reference = runs[*case[:3], "single m3"]
    _is_not_vacuous(case[1], reference)
    assert_same(runs[case], reference, TOLERANCE[case[2]])


def _is_not_vacuous(variant: str, reference: Trace) -> None:
    assert len(set(reference.losses)) == 10
    assert all(norm > 1e-3 for norm in reference.norms)
    moved = {
        name for name, before in reference.before.items() if not np.array_equal(reference.parameters[name], before)
    }
    if "adapter" in VARIANTS[variant]:
        adapters = {name for name in reference.before if ".lora_" in name}
        assert moved == adapters == set(reference.gradients)
        assert len(adapters) >= 20
        assert len(reference.before) > len(adapters), "there is no base"
        first = {name for name, gradient in reference.gradients.items() if np.any(gradient)}
        assert first == {name for name in adapters if ".lora_B." in name}, "A has no gradient while B is zero"
        assert reference.losses[-1] < reference.losses[0]
    if "ema" in VARIANTS[variant]:
        assert set(reference.average) == set(reference.gradients)
        same = {name for name, value in reference.average.items() if np.array_equal(value, reference.parameters[name])}
        assert same <= without_gradient(reference) - moved
        assert reference.evaluation["ema/loss"] != reference.evaluation["loss"]
    else:
        assert not reference.average


def test_adapter_dropout_is_drawn_and_changes_the_run(runs: dict[Case, Trace]) -> None:
    for model in MODELS:
        plain = runs[model, "adapters", "fp64", "single m3"]
        dropped = runs[model, "adapters with dropout, and their average", "fp64", "single m3"]
        assert plain.losses[0] == pytest.approx(dropped.losses[0], rel=1e-12), "B is zero, so nothing is dropped yet"
        assert plain.losses[2] != pytest.approx(dropped.losses[2], rel=1e-6)


# resume ---------------------------------------------------------------------------------------------------------------

RESUMED = {name: VARIANTS[name] for name in ("average", "adapters with dropout, and their average")}


def _resumable(layout: str, variant: str, optim: Any, precision: str) -> Any:
    config = test_resume_is_exact._config(layout, optim, precision)
    groups = configuration(**RESUMED[variant])
    return config.model_copy(update={"ema": groups.ema, "adapter": groups.adapter})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every run without interruption, and every interrupted one, not yet resumed."""
    root = tmp_path_factory.mktemp("resume")
    for layout in ("single", "ddp×2", "fsdp×2", "hsdp 2×2"):
        made: list[tuple[Any, Path, int | None]] = []
        for variant in RESUMED:
            for name, optim, precision in (("adamw", ADAMW, "fp32"), ("sgd", SGD, "fp64")):
                config = _resumable(layout, variant, optim, precision)
                made.append((config, root / f"{layout} {variant} {name} whole", None))
                made.append((config, root / f"{layout} {variant} {name} cut", INTERRUPTED))
        _go(layout, made)
    return root


@pytest.mark.parametrize("layout", ["single", "ddp×2", "fsdp×2", "hsdp 2×2"])
def test_the_same_layout_goes_on_bit_for_bit(folder: Path, tmp_path: Path, layout: str) -> None:
    made: list[tuple[Any, Path, int | None]] = []
    for variant in RESUMED:
        for name, optim, precision in (("adamw", ADAMW, "fp32"), ("sgd", SGD, "fp64")):
            cut = _moved(folder / f"{layout} {variant} {name} cut", tmp_path)
            made.append((_resumable(layout, variant, optim, precision), cut, None))
    _go(layout, made)
    for config, cut, _ in made:
        whole = folder / cut.name.replace("cut", "whole")
        mine, reference = final(cut), final(whole)
        assert mine.keys() == reference.keys()
        assert {name.partition("/")[0] for name in reference} >= {"model", "optimizer", "ema"}
        assert all(np.array_equal(mine[name], value) for name, value in reference.items())
        apart = [n for n in _averaged(reference) if not np.array_equal(reference[f"ema/{n}"], reference[f"model/{n}"])]
        assert len(apart) > len(_averaged(reference)) - 3, "all but key biases, whose true gradient is zero"
        assert events(cut) == events(whole)
        if config.adapter:
            assert all(".lora_" in name for name in reference if name.startswith(("model/blocks", "optimizer/")))
            assert "adapter/base" in reference
            assert "model/embedding.weight" not in reference


def _averaged(arrays: dict[str, np.ndarray]) -> list[str]:
    names = [name.removeprefix("ema/") for name in arrays if name.startswith("ema/")]
    assert names
    return names


@pytest.mark.parametrize(("before", "after"), [("single", "fsdp×2"), ("fsdp×2", "ddp×2"), ("hsdp 2×2", "single")])
def test_another_layout_goes_on_to_the_floor(folder: Path, tmp_path: Path, before: str, after: str) -> None:
    made: list[tuple[Any, Path, int | None]] = []
    for variant in RESUMED:
        cut = _moved(folder / f"{before} {variant} sgd cut", tmp_path)
        made.append((_resumable(after, variant, SGD, "fp64"), cut, None))
    _go(after, made)
    for variant, (_, cut, _) in zip(RESUMED, made, strict=True):
        whole = folder / f"single {variant} sgd whole"
        mine, reference = final(cut), final(whole)
        for kind in ("model/", "ema/"):
            pair = [{n: v for n, v in values.items() if n.startswith(kind)} for values in (mine, reference)]
            assert max(distance(*pair).values()) < 1e-12
        for event, expected in zip(events(cut), events(whole), strict=True):
            assert event == pytest.approx(expected, rel=1e-12)
    assert STEPS == 8
