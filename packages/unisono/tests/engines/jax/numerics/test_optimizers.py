"""The same gradients make the same updates as in torch, with groups, schedules and decay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from unisono.config.schema.optimizers import Optimizer as Settings
from unisono.engines.jax.numerics import optimizers
from unisono.optim import optimizers as of_torch
from unisono.runtime.errors import ConfigError

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "adamw", "weight_decay": 0.1},
    "sgd": {"kind": "sgd"},
    "sgd, nesterov": {"kind": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "lion": {"kind": "lion"},
    "adam-atan2": {"kind": "adam_atan2", "weight_decay": 0.1},
    "adafactor": {"kind": "adafactor", "weight_decay": 0.1},
    "adafactor, other eps": {"kind": "adafactor", "eps": (1e-2, 1e-2), "clip": 2.0, "beta2_decay": -0.5},
    "muon": {"kind": "muon"},
    "muon, plain": {
        "kind": "muon", "nesterov": False, "adjust_lr": "original", "rest": {"kind": "lion", "lr": 1e-3},
    },
}  # fmt: skip
GROUPS = [
    {"match": "head.*", "lr_scale": 0.3, "weight_decay": 0.2},
    {"match": "*.b.weight", "lr_scale": 2.0},
    {"match": "*.a.bias", "rule": "sign_sgd", "weight_decay": 0.5, "lr_scale": 3.0},
    {"match": "blocks.1.a.weight", "rule": "sign_sgd"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 6)


def module() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks, model.head = nn.ModuleList([Block(), Block()]), nn.Linear(6, 3)
    model.stack = nn.Parameter(torch.randn(2, 3, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.double()


def structure_of(model: nn.Module) -> Any:
    shapes = {name: jax.ShapeDtypeStruct(tuple(p.shape), np.float64) for name, p in model.named_parameters()}
    blocks = tuple(frozenset(name for name in shapes if name.startswith(f"blocks.{n}.")) for n in range(2))
    return SimpleNamespace(
        names=tuple(shapes), shapes=shapes, trained=frozenset(shapes), blocks=blocks, no_decay=frozenset()
    )  # fmt: skip


def settings(values: dict[str, Any]) -> Any:
    return TypeAdapter(Settings).validate_python(values)


@pytest.mark.parametrize("groups", [[], GROUPS], ids=["", "groups"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_twenty_updates_are_those_of_torch(kind: dict[str, Any], groups: list[Any]) -> None:
    config, model = settings({**kind, "groups": groups}), module()
    theirs = of_torch.build_optimizer(config, model, list(model.blocks))
    with jax.enable_x64(True):
        mine = optimizers.build_optimizer(config, structure_of(model))
        assert sorted(mine.describe(structure_of(model))) == sorted(of_torch.describe_updates(config, theirs, model))
        values = {name: jnp.asarray(p.detach().numpy().copy()) for name, p in model.named_parameters()}
        before, state, update = dict(values), mine.init(values), jax.jit(mine.update)
        rng = np.random.default_rng(1)
        for step in range(20):
            scalars = {"lr": config.lr * (step + 1) / 10, "weight_decay": config.weight_decay * 0.5}
            gradients = {n: rng.normal(size=p.shape) * 10 ** rng.uniform(-3, 1) for n, p in values.items()}
            gradients["blocks.1.a.weight"][step % 4] = 0.0  # a row without a gradient
            for name, parameter in model.named_parameters():
                parameter.grad = torch.from_numpy(gradients[name].copy())
            of_torch.apply_schedule(theirs, scalars, config)
            theirs.step()
            values, state = update(
                {name: jnp.asarray(gradient) for name, gradient in gradients.items()}, state, values,
                {name: jnp.asarray(value) for name, value in scalars.items()},
            )  # fmt: skip
    for name, parameter in model.named_parameters():
        expected = parameter.detach().numpy()
        assert np.abs(np.asarray(values[name]) - expected).max() < 1e-12 * np.abs(expected).max(), name
        assert np.abs(np.asarray(values[name]) - np.asarray(before[name])).max() > 1e-4, name


def test_muon_takes_a_stack_of_matrices_one_by_one() -> None:
    config, model = settings({"kind": "muon", "groups": [{"match": "stack", "muon": True}]}), module()
    with jax.enable_x64(True):
        mine = optimizers.build_optimizer(config, structure_of(model))
        names = [name for name, chosen in mine.chosen.items() if chosen.muon]
        assert "stack" in names and "head.weight" not in names
        values = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
        scalars = {"lr": jnp.asarray(0.1)}
        after, _ = mine.update(values, mine.init(values), values, scalars)
        for number in range(2):
            alone = {**values, "blocks.0.a.weight": values["stack"][number]}
            matrix, _ = mine.update(alone, mine.init(alone), alone, scalars)
            np.testing.assert_allclose(after["stack"][number], matrix["blocks.0.a.weight"], rtol=1e-12)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"groups": [{"match": "haed.*"}]}, "'haed.*' matches no parameter"),
        ({"implementation": "foreach"}, "XLA compiles the update"),
        ({"kind": "muon", "groups": [{"match": "head.bias", "muon": True}]}, "updates matrices"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        optimizers.build_optimizer(settings({"kind": "adamw", **more}), structure_of(module()))
