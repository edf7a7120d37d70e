"""A recipe's task in torch against that in JAX: cases, whose weights they take, what is a difference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from packages.unisono.tests.proof.test_comparison import Change, trace
from unisono.config.code import recipes
from unisono.config.code.recipes import Recipe
from unisono.proof import engines
from unisono.proof.cases import ProofSettings
from unisono.proof.prove import plan_phases
from unisono.proof.recording.trace import INITIAL_BUFFERS, write_tensors
from unisono.runtime.errors import ConfigError

BOTH = {"torch": "packages.unisono.tests.tasks:LinearTask", "jax": "packages.unisono.tests.jax_tasks:UnevenTask"}


def in_jax(name: str) -> str:
    return f"model.{name}"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = {
        "both": Recipe(tasks=BOTH, weight_names="packages.unisono.tests.proof.test_engines:in_jax"),
        "one": Recipe(tasks={"torch": BOTH["torch"]}),
        "wrong": Recipe(tasks=BOTH, weight_names="packages.unisono.tests.proof.test_engines:nowhere"),
    }
    entries = {
        name: SimpleNamespace(value=name, module="packages.unisono.tests.tasks", load=lambda recipe=recipe: recipe)
        for name, recipe in found.items()
    }
    recipes.find_recipe.cache_clear()
    monkeypatch.setattr(recipes, "_entry_points", lambda: entries)
    yield
    recipes.find_recipe.cache_clear()


def config(recipe: str) -> Any:
    return SimpleNamespace(recipe=recipe, data=SimpleNamespace(mixture=None))


@pytest.mark.usefixtures("registered")
def test_each_engine_runs_by_itself_torch_first_and_jax_with_its_weights() -> None:
    proof = ProofSettings.model_validate({"engines": ["jax", "torch"]})
    one, one_perturbed, other, other_perturbed = engines.cases(proof, config("both"))
    assert (one.engine, other.engine, other.reference, other.weights_from) == ("torch", "jax", one.name, one.name)
    assert proof.steps == 10 and ProofSettings.model_validate({"engines": ["torch", "jax"], "steps": 4}).steps == 4
    for plain, perturbed in ((one, one_perturbed), (other, other_perturbed)):
        assert perturbed.perturbed and perturbed.perturbed_steps and not perturbed.reference
        assert (perturbed.engine, perturbed.weights_from) == (plain.engine, plain.weights_from)
    assert plan_phases([other, one]) == [[one], [other]]
    assert ProofSettings.model_validate(proof.model_dump()) == proof


@pytest.mark.usefixtures("registered")
def test_what_cannot_be_compared_is_refused_with_the_way_out() -> None:
    proof = ProofSettings.model_validate({"engines": ["torch", "jax"]})
    with pytest.raises(ConfigError, match=r"layout\.engine=jax: the recipe 'one' has no task for it"):
        engines.cases(proof, config("one"))
    with pytest.raises(ConfigError, match=r"mine\.py:Mine is one task; register both in one Recipe"):
        engines.cases(proof, config("mine.py:Mine"))
    with pytest.raises(ConfigError, match=r"recipe 'wrong': weight_names=.*nowhere cannot be imported"):
        engines.names_of("wrong")
    with pytest.raises(ValidationError, match=r"has to be \[torch,jax\]"):
        ProofSettings.model_validate({"engines": ["torch", "torch"]})
    with pytest.raises(ValidationError, match=r"does not go with vary=…"):
        ProofSettings.model_validate({"engines": ["torch", "jax"], "vary": ["ranks"]})


def renamed(change: Change | None = None) -> Change:
    """A trace as JAX writes it: other names, and what torch has for a buffer among the parameters that stay."""

    def made(facts: Any, tensors: Any) -> None:
        if change:
            change(facts, tensors)
        for moment, values in list(tensors.items()):
            tensors[moment] = {in_jax(name): value for name, value in values.items()}
            if moment[0] in ("initial parameters", "parameters"):
                tensors[moment][in_jax("b")] = np.ones(1)
        facts.trainable = [in_jax(name) for name in facts.trainable]
        facts.frozen = [in_jax(name) for name in (*facts.frozen, "b")]

    return made


def marks(
    tmp_path: Path, change: Change | None = None, rounding: dict[tuple[str, int], float] | None = None
) -> dict[str, str]:
    tmp_path.mkdir(exist_ok=True)
    one = trace(tmp_path / "torch")
    write_tensors(tmp_path / "torch", INITIAL_BUFFERS, None, {"b": np.ones(1)})
    mine = trace(tmp_path / "jax", 1, renamed(change))
    return {c.quantity: c.mark for c in engines.compared(mine, one, "both", rounding or {})}


@pytest.mark.usefixtures("registered")
def test_equal_runs_pass_under_their_own_names(tmp_path: Path) -> None:
    found = marks(tmp_path)
    assert set(found.values()) == {"PASS"} and {"raw gradients", "parameters", "EMA", "outputs"} <= found.keys()
    assert not {"optimizer state", "learning rate", "buffers"} & found.keys()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        (lambda _, tensors: tensors["raw gradients", 1]["w"].__imul__(1 + 1e-9), "raw gradients"),
        (lambda _, tensors: tensors["initial parameters", None]["w"].__iadd__(1e-15), "initial parameters"),
        (lambda _, tensors: tensors["parameters", 0].pop("w"), "parameters"),
        (lambda facts, _: setattr(facts.steps[1], "loss", 1.0 + 1e-9), "loss"),
        (lambda facts, _: facts.steps[0].rows.reverse(), "sample ids"),
    ],
)
def test_a_difference_fails(tmp_path: Path, change: Change, quantity: str) -> None:
    assert marks(tmp_path, change)[quantity] == "FAIL"


def grown(_: Any, tensors: Any) -> None:
    """Gradients of the second step differ by 1e-9, as rounding does that a recursive model amplifies."""
    tensors["raw gradients", 1]["w"] *= 1 + 1e-9


@pytest.mark.usefixtures("registered")
def test_rounding_is_allowed_in_the_step_where_an_engine_shows_it_and_in_no_other(tmp_path: Path) -> None:
    proof = ProofSettings.model_validate({"engines": ["torch", "jax"]})
    one, _, other, other_perturbed = every = engines.cases(proof, config("both"))
    traces = {one.name: trace(tmp_path / "one"), other.name: trace(tmp_path / "other", 1, renamed())}
    traces[other_perturbed.name] = trace(tmp_path / "perturbed", 1, renamed(grown))
    rounding = engines.measure_rounding(other, every, traces)
    assert rounding["raw gradients", 2] == pytest.approx(8e-9)
    assert rounding["raw gradients", 1] == rounding["loss", 2] == 0.0
    assert marks(tmp_path / "right", grown, rounding)["raw gradients"] == "PASS"
    assert marks(tmp_path / "none", grown)["raw gradients"] == "FAIL"
    elsewhere = {("raw gradients", 1): 8e-9}
    assert marks(tmp_path / "elsewhere", grown, elsewhere)["raw gradients"] == "FAIL"
