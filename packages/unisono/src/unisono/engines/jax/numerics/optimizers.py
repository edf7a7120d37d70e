"""Optimizers by optax, with the settings, parameter groups and schedules of the torch engine.

A transformation of optax makes the direction; learning rate and weight decay are applied here, since each parameter has
its own and both are scheduled. SGD decays as torch does, through the gradient; the others decay weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from unisono.config.schema import optimizers as settings
from unisono.config.schema.optimizers import OptimizerGroup
from unisono.engines.jax.model import Structure
from unisono.engines.jax.numerics import transforms
from unisono.optim.groups import ParameterSettings, check_not_for_own, choose_settings
from unisono.runtime.errors import ConfigError

Tree = dict[str, Any]


@dataclass(frozen=True)
class Optimizer:
    """Updates all parameters; its state is a pytree of arrays that lie as their parameters do.

    Attributes:
        config: the group `optim`.
        chosen: by parameter.
        own: of the task, in place of that of the group.
    """

    config: OptimizerGroup
    chosen: Mapping[str, ParameterSettings]
    own: optax.GradientTransformation | None = None

    def init(self, parameters: Tree) -> Tree:
        """The state before the first update, by kind."""
        return {kind: rule.init(_select(parameters, names)) for kind, rule, names in self._parts()}

    def update(
        self, gradients: Tree, state: Tree, parameters: Tree, scalars: Mapping[str, jax.Array]
    ) -> tuple[Tree, Tree]:
        """Parameters and state after one update.

        Args:
            gradients: clipped.
            state: from `init` or the update before.
            parameters: as they are.
            scalars: scheduled values: `lr`, and `weight_decay` where that is scheduled.
        """
        factor: Any = 1.0
        if "weight_decay" in scalars and self.config.weight_decay:
            factor = scalars["weight_decay"] / self.config.weight_decay
        made: Tree = {}
        after: Tree = {}
        for kind, rule, names in self._parts():
            through = kind == "sgd"
            own, values = _select(gradients, names), _select(parameters, names)
            if through:
                own = {name: g + self.chosen[name].decay * factor * values[name] for name, g in own.items()}
            if kind == "sign_sgd":
                by_row = {n: _by_row(g, values[n], self.chosen[n].decay * factor) for n, g in own.items()}
                made |= {n: values[n] - scalars["lr"] * self.chosen[n].lr_scale * step for n, step in by_row.items()}
                after[kind] = state[kind]
                continue
            directions, after[kind] = rule.update(own, state[kind], values)
            for name, direction in directions.items():
                lr = scalars["lr"] * self.chosen[name].lr_scale
                rate = lr
                if kind == "adafactor":
                    rate = jnp.minimum(lr, 1 / jnp.sqrt(after[kind].updates.astype(lr.dtype)))
                kept = values[name] if through else values[name] * (1 - lr * self.chosen[name].decay * factor)
                made[name] = (kept - rate * direction).astype(values[name].dtype)
        return made, after

    def describe(self, structure: Structure) -> list[str]:
        """How parameters are updated: a line per group with the same settings, the largest first."""
        own = "the task's optimizer" if self.own is not None else ""
        groups = _group(self.chosen)
        sizes = {one: sum(prod(structure.shapes[name].shape) for name in names) for one, names in groups.items()}
        largest_first = sorted(groups, key=sizes.__getitem__, reverse=True)
        return [
            chosen.describe(self.config, groups[chosen], sizes[chosen], self.chosen, own) for chosen in largest_first
        ]

    def _parts(self) -> list[tuple[str, optax.GradientTransformation, list[str]]]:
        """Kind, transformation and parameters of each optimizer that takes part."""
        if self.own is not None:
            return [("own", self.own, list(self.chosen))]
        names: dict[str, list[str]] = {"sign_sgd": [], "muon": [], "rest": []}
        for name, chosen in self.chosen.items():
            names[chosen.rule or ("muon" if chosen.muon else "rest")].append(name)
        rest = self.config.rest if isinstance(self.config, settings.Muon) else self.config
        parts = [("sign_sgd", optax.identity(), names["sign_sgd"])] if names["sign_sgd"] else []
        if isinstance(self.config, settings.Muon):
            parts.append(("muon", transforms.muon(self.config), names["muon"]))
        return [*parts, (rest.kind, _build_direction(rest), names["rest"])]


def build_optimizer(
    config: OptimizerGroup, structure: Structure, own: Callable[[list[dict[str, Any]]], Any] = lambda groups: None
) -> Optimizer:
    """The optimizer of a model's trained parameters, grouped as the config says; see `choose_settings`.

    Raises:
        ConfigError: for a pattern that matches no parameter, or a matrix that Muon cannot take.
    """
    if config.implementation != "auto":
        raise ConfigError(
            f"optim.implementation={config.implementation} chooses among torch's kernels, but XLA compiles the update; "
            "remove this setting"
        )
    shapes = {name: structure.shapes[name].shape for name in structure.names if name in structure.trained}
    chosen = choose_settings(
        config,
        shapes,
        hidden=frozenset[str]().union(*structure.blocks) - structure.no_decay,
        exempt=structure.no_decay,
        not_muon={name for name, shape in shapes.items() if len(shape) < 2},
        muon_updates="matrices (and stacks of them)",
    )
    made = own([{"params": names, "weight_decay": one.decay} for one, names in _group(chosen).items()])
    if made is not None and not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"the task's optimizer() returned {type(made).__name__}; in JAX, return an optax.GradientTransformation "
            "from gradients to the direction of the update, or None"
        )
    if made is not None:
        check_not_for_own(chosen.values(), "of optax")
    return Optimizer(config, chosen, made)


def _group(chosen: Mapping[str, ParameterSettings]) -> dict[ParameterSettings, list[str]]:
    groups: dict[ParameterSettings, list[str]] = {}
    for name, one in chosen.items():
        groups.setdefault(one, []).append(name)
    return groups


def _build_direction(config: OptimizerGroup) -> optax.GradientTransformation:
    match config:
        case settings.AdamW():
            return optax.scale_by_adam(*config.betas, eps=config.eps)
        case settings.Sgd():
            return optax.trace(config.momentum, config.nesterov) if config.momentum else optax.identity()
        case settings.Lion():
            return optax.scale_by_lion(*config.betas)
        case settings.AdamAtan2():
            return transforms.adam_atan2(config)
        case settings.Adafactor():
            return transforms.adafactor(config)
    raise AssertionError(config)


def _by_row(gradient: jax.Array, value: jax.Array, decay: Any) -> jax.Array:
    """Sign SGD by rows; see `unisono.optim.sign_sgd`."""
    axes = tuple(range(1, gradient.ndim))
    changes = (gradient != 0).any(axes, keepdims=True)
    return jnp.where(changes, jnp.sign(gradient) + decay * value, 0.0)


def _select(tree: Tree, names: Sequence[str]) -> Tree:
    return {name: tree[name] for name in names}
