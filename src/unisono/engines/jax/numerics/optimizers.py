"""Optimizers by optax, with the settings, parameter groups and schedules of the torch engine.

A transformation of optax makes the direction; learning rate and weight decay are applied here, since each parameter has
its own and both are scheduled. SGD decays as torch does, through the gradient; the others decay weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax

from unisono.config.schema import optimizers as settings
from unisono.config.schema.optimizers import OptimizerGroup, ParameterGroup
from unisono.engines.jax.model import Structure
from unisono.engines.jax.numerics import transforms
from unisono.runtime.errors import ConfigError, nearest
from unisono.runtime.text import join_names

Tree = dict[str, Any]


@dataclass(frozen=True)
class ParameterSettings:
    """The optimizer settings of a parameter.

    Attributes:
        lr_scale: of the scheduled learning rate.
        decay: weight decay, before its schedule.
        muon: whether Muon takes it.
        rule: another update than the optimizer's own, as `optim.groups` has it.
    """

    lr_scale: float
    decay: float
    muon: bool
    rule: str | None = None


@dataclass(frozen=True)
class Optimizer:
    """Updates all parameters; its state is a pytree of arrays that lie as their parameters do.

    Attributes:
        config: the group `optim`.
        chosen: by parameter.
    """

    config: OptimizerGroup
    chosen: Mapping[str, ParameterSettings]

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
                rate = self._relative(lr, after[kind]) if kind == "adafactor" else lr
                kept = values[name] if through else values[name] * (1 - lr * self.chosen[name].decay * factor)
                made[name] = (kept - rate * direction).astype(values[name].dtype)
        return made, after

    def describe(self, structure: Structure) -> list[str]:
        """How parameters are updated: a line per group with the same settings."""
        groups: dict[ParameterSettings, list[str]] = {}
        for name, chosen in self.chosen.items():
            groups.setdefault(chosen, []).append(name)
        lines = []
        for chosen, names in groups.items():
            own = self.config.rest if isinstance(self.config, settings.Muon) and not chosen.muon else self.config
            kind = chosen.rule or own.kind
            count = sum(prod(structure.shapes[name].shape) for name in names)
            rates = f"lr {self.config.lr * chosen.lr_scale:g}, weight decay {chosen.decay:g}"
            lines.append(f"{kind}, {rates}: {count:,} parameters in {join_names(names)}")
        return lines

    def _relative(self, lr: jax.Array, state: transforms.Factors) -> jax.Array:
        return jnp.minimum(lr, 1 / jnp.sqrt(state.updates.astype(lr.dtype)))

    def _parts(self) -> list[tuple[str, optax.GradientTransformation, list[str]]]:
        """Kind, transformation and parameters of each optimizer that takes part."""
        names: dict[str, list[str]] = {"sign_sgd": [], "muon": [], "rest": []}
        for name, chosen in self.chosen.items():
            names[chosen.rule or ("muon" if chosen.muon else "rest")].append(name)
        rest = self.config.rest if isinstance(self.config, settings.Muon) else self.config
        parts = [("sign_sgd", optax.identity(), names["sign_sgd"])] if names["sign_sgd"] else []
        if isinstance(self.config, settings.Muon):
            parts.append(("muon", transforms.muon(self.config), names["muon"]))
        return [*parts, (rest.kind, _build_direction(rest), names["rest"])]


def build_optimizer(config: OptimizerGroup, structure: Structure) -> Optimizer:
    """The optimizer of a model's trained parameters, grouped as the config says.

    Matrices decay, but no biases, norms and embeddings (unless `decay_all`); Muon takes the matrices of blocks. The
    first pattern of `optim.groups` that matches a parameter can say otherwise.

    Raises:
        ConfigError: for a pattern that matches no parameter, or a matrix that Muon cannot take.
    """
    if config.implementation != "auto":
        raise ConfigError(
            f"optim.implementation={config.implementation} chooses among torch's kernels, but XLA compiles the update; "
            "remove this setting"
        )
    trained = [name for name in structure.names if name in structure.trained]
    hidden = frozenset[str]().union(*structure.blocks) - structure.no_decay
    for pattern in config.groups:
        if not any(fnmatchcase(name, pattern.match) for name in trained):
            raise ConfigError(
                f"optim.groups: '{pattern.match}' matches no parameter, {nearest(pattern.match, trained)}"
            )
    chosen = {name: _choose_settings(config, structure, name, name in hidden) for name in trained}
    if isinstance(config, settings.Muon) and not any(one.muon for one in chosen.values()):
        raise ConfigError(
            "optim=muon: the model has no repeated blocks with matrices, so its hidden matrices are not "
            f"known. Name them: optim.groups=[{{match: '*.weight', muon: true}}]; its parameters are "
            f"{join_names(trained)}"
        )
    return Optimizer(config, chosen)


def _choose_settings(config: OptimizerGroup, structure: Structure, name: str, hidden: bool) -> ParameterSettings:
    pattern = next((p for p in config.groups if fnmatchcase(name, p.match)), ParameterGroup(match="*"))
    shape = structure.shapes[name].shape
    matrix = not name.endswith("bias")
    muon = isinstance(config, settings.Muon) and matrix and len(shape) == 2 and hidden and pattern.rule is None
    muon = muon if pattern.muon is None else pattern.muon
    if muon and len(shape) < 2:
        raise ConfigError(
            f"optim.groups: '{pattern.match}' assigns '{name}' of shape {shape} to Muon, which updates matrices (and "
            "stacks of them) only; let the pattern match those alone"
        )
    own = config.rest if isinstance(config, settings.Muon) and not muon else config
    decays = config.decay_all or (matrix and len(shape) >= 2 and name not in structure.no_decay)
    decay = (own.weight_decay if decays else 0.0) if pattern.weight_decay is None else pattern.weight_decay
    return ParameterSettings(
        pattern.lr_scale * (own.lr / config.lr if own is not config else 1.0), decay, muon, pattern.rule
    )


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
