"""Optimizers update as their formulas say, whichever kernel does it, and their groups hold what the config says."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from unisono.config.schema.optimizers import Optimizer, OptimizerGroup
from unisono.optim.optimizers import apply_schedule, build_optimizer, parameter_groups
from unisono.runtime.errors import ConfigError


def config(kind: str = "adamw", **values: Any) -> OptimizerGroup:
    made: OptimizerGroup = TypeAdapter(Optimizer).validate_python({"kind": kind, **values})
    return made


class Net(nn.Module):
    """One of each kind of parameter; the head is the embedding's matrix if `tied`."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.convolution = nn.Conv1d(4, 4, 3)
        self.middle = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.wide_norm = nn.LayerNorm((3, 4))
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def group_values(setting: str, of: OptimizerGroup, model: nn.Module) -> dict[str, float]:
    """A setting of each parameter's group, by the parameter's name."""
    by_id = {id(p): group[setting] for group in parameter_groups(of, model) for p in group["params"]}
    return {name: by_id[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in by_id}


decays, scales = partial(group_values, "weight_decay"), partial(group_values, "lr_scale")


# decay --------------------------------------------------------------------------------------------------------------


def test_matrices_decay_and_biases_norms_and_embeddings_do_not() -> None:
    found = decays(config(weight_decay=0.1), Net())
    assert {name for name, decay in found.items() if decay} == {"convolution.weight", "middle.weight", "head.weight"}
    assert found["middle.weight"] == 0.1
    assert decays(config(weight_decay=0.1), nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 1)))["0.weight"] == 0.0


def test_embeddings_do_not_decay_even_as_the_matrix_of_a_head_that_is_registered_first() -> None:
    class HeadFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 7, bias=False)
            self.embedding = nn.Embedding(7, 4)
            self.embedding.weight = self.head.weight

    assert decays(config(weight_decay=0.1), Net(tied=True))["embedding.weight"] == 0.0
    assert decays(config(weight_decay=0.1), HeadFirst()) == {"head.weight": 0.0}


def test_everything_decays_if_asked_for() -> None:
    assert set(decays(config(weight_decay=0.1, decay_all=True), Net(tied=True)).values()) == {0.1}


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_exactly_one_group(tied: bool) -> None:
    model = Net(tied)
    held = [id(p) for group in parameter_groups(config(), model) for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


# groups by pattern --------------------------------------------------------------------------------------------------


def test_a_pattern_gives_its_parameters_their_own_rate_and_decay_and_leaves_the_others() -> None:
    found = scales(config(groups=[{"match": "middle.*", "lr_scale": 0.5}]), Net())
    assert {name for name, scale in found.items() if scale == 0.5} == {"middle.weight", "middle.bias"}
    assert set(found.values()) == {0.5, 1.0}
    found = decays(config(weight_decay=0.1, groups=[{"match": "*norm.*", "weight_decay": 0.3}]), Net())
    assert {name for name, decay in found.items() if decay == 0.3} == {
        "norm.weight", "norm.bias", "wide_norm.weight", "wide_norm.bias",
    }  # fmt: skip
    assert decays(config(groups=[{"match": "middle.weight", "weight_decay": 0}]), Net())["middle.weight"] == 0.0
    of, plain = config(weight_decay=0.1, groups=[{"match": "*", "lr_scale": 2}]), config(weight_decay=0.1)
    assert decays(of, Net()) == decays(plain, Net())


def test_the_first_matching_pattern_counts_even_if_it_leaves_others_nothing() -> None:
    for first, second in (("middle.*", "*.weight"), ("*.weight", "middle.*"), ("*", "middle.*")):
        groups = [{"match": first, "lr_scale": 0.5}, {"match": second, "lr_scale": 0.25}]
        found = scales(config(groups=groups), Net())
        assert found["middle.weight"] == 0.5
    assert set(found.values()) == {0.5}


@pytest.mark.parametrize(("match", "nearest"), [("midle.weight", "middle.weight"), ("MIDDLE.*", "")])
def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name(match: str, nearest: str) -> None:
    told = f", did you mean '{nearest}'?" if nearest else ""
    with pytest.raises(ConfigError, match=re.escape(f"'{match}' matches no parameter{told}")):
        build_optimizer(config(groups=[{"match": match}]), Net())


# what trains --------------------------------------------------------------------------------------------------------


def test_frozen_parameters_are_in_no_group_and_a_model_with_nothing_to_train_is_refused() -> None:
    model = Net()
    model.middle.requires_grad_(False)
    held = {id(p) for group in build_optimizer(config(), model).param_groups for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if not name.startswith("middle")}
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(config(), model.requires_grad_(False))


# schedules ----------------------------------------------------------------------------------------------------------


GROUPS = [{"match": "head.*", "lr_scale": 0.5, "weight_decay": 0.4}, {"match": "norm.*", "lr_scale": 0}]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_scheduled_rate_reaches_every_group(kind: str) -> None:
    of, model = config(kind, groups=GROUPS), Net()
    optimizer = build_optimizer(of, model)
    apply_schedule(optimizer, {"lr": 0.02}, of)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == {"head": 0.01, "norm": 0.0}.get(name.split(".")[0], 0.02)


def test_a_scheduled_decay_reaches_every_group_in_proportion_and_does_not_compound() -> None:
    of, model = config(weight_decay=0.1, groups=GROUPS), Net()
    optimizer = build_optimizer(of, model)
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    parts = [found[id(part.weight)] for part in (model.middle, model.head)] + [found[id(model.middle.bias)]]
    apply_schedule(optimizer, {"lr": 0.02}, of)
    assert [part["weight_decay"] for part in parts] == [0.1, 0.4, 0.0], "not scheduled"
    for _ in range(3):
        apply_schedule(optimizer, {"lr": 0.02, "weight_decay": 0.05}, of)
    assert parts[1]["lr"] == 0.01
    assert [part["weight_decay"] for part in parts] == pytest.approx([0.05, 0.2, 0.0])


# formulas -----------------------------------------------------------------------------------------------------------

STEPS = 4


def _gradients(shape: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) * 10.0 ** rng.integers(-4, 2, size=shape) for _ in range(STEPS)]


def _torch(of: OptimizerGroup, start: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """A matrix after so many updates by the optimizer that the config builds."""
    model = nn.Linear(start.shape[1], start.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(start))
    optimizer = build_optimizer(of, model)
    for gradient in gradients:
        model.weight.grad = torch.from_numpy(gradient.copy())
        apply_schedule(optimizer, {"lr": of.lr}, of)
        optimizer.step()
    return model.weight.detach().numpy()


def _adamw(
    p: np.ndarray, gradients: list[np.ndarray], lr: float, b1: float, b2: float, eps: float, wd: float
) -> np.ndarray:
    """Algorithm 2 of Loshchilov & Hutter (2019), with the schedule multiplier one and decay scaled by the rate."""
    p, m, v = p.copy(), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr * wd * p - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return p


def _sgd(
    p: np.ndarray, gradients: list[np.ndarray], lr: float, momentum: float, nesterov: bool, wd: float
) -> np.ndarray:
    """Heavy ball with the decay as part of the gradient; Nesterov's as in Sutskever et al. (2013), as torch has it."""
    p, velocity = p.copy(), np.zeros_like(p)
    for g in gradients:
        g = g + wd * p
        velocity = momentum * velocity + g
        p = p - lr * (g + momentum * velocity if nesterov else velocity)
    return p


def _same(mine: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(mine, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "loop"])
def test_adamw_is_its_formula(implementation: str) -> None:
    start, gradients = _gradients((3, 5), seed=1)[0], _gradients((3, 5))
    of = config(lr=0.01, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, implementation=implementation)
    _same(_torch(of, start, gradients), _adamw(start, gradients, 0.01, 0.9, 0.95, 1e-6, 0.1))


@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "loop"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_its_formula(implementation: str, momentum: float, nesterov: bool) -> None:
    start, gradients = _gradients((3, 5), seed=1)[0], _gradients((3, 5))
    of = config("sgd", lr=0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.01, implementation=implementation)
    _same(_torch(of, start, gradients), _sgd(start, gradients, 0.1, momentum, nesterov, 0.01))


@pytest.mark.parametrize(
    ("kind", "implementation", "fused", "foreach"),
    [
        ("adamw", "auto", True, None),
        ("sgd", "auto", None, True),
        ("adamw", "loop", False, False),
        ("sgd", "fused", True, False),
    ],
)
def test_the_kernel_is_the_one_that_was_asked_for(
    kind: str, implementation: str, fused: bool | None, foreach: bool | None
) -> None:
    (group,) = build_optimizer(
        config(kind, implementation=implementation, decay_all=True), nn.Linear(3, 2)
    ).param_groups
    assert (group["fused"], group["foreach"]) == (fused, foreach)
