"""Updates that optax lacks or implements differently from torch, as optax transformations.

Adam-atan2 is not in optax. Its Muon corrects the momentum's bias before Nesterov's step, and its Adafactor adds its
epsilon where torch takes a maximum; a run would then depend on the engine. So these follow the formulas of torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from unisono.config.schema import optimizers as settings

Tree = dict[str, Any]


class Moments(NamedTuple):
    """Steps made, and the first and second moments by name."""

    updates: jax.Array
    mu: Tree
    nu: Tree


def adam_atan2(config: settings.AdamAtan2) -> optax.GradientTransformation:
    """A · atan2(m̂, b·√v̂), of Everett et al., "Scaling Exponents Across Parameterizations and Optimizers" (2024)."""
    beta1, beta2 = config.betas

    def init(parameters: Tree) -> Moments:
        return Moments(jnp.zeros([], jnp.int32), optax.tree.zeros_like(parameters), optax.tree.zeros_like(parameters))

    def update(gradients: Tree, state: Moments, parameters: Any = None) -> tuple[Tree, Moments]:
        mu = optax.tree.update_moment(gradients, state.mu, beta1, 1)
        nu = optax.tree.update_moment_per_elem_norm(gradients, state.nu, beta2, 2)
        count = state.updates + 1
        first, second = optax.tree.bias_correction(mu, beta1, count), optax.tree.bias_correction(nu, beta2, count)
        made = {name: config.a * jnp.arctan2(first[name], config.b * jnp.sqrt(second[name])) for name in gradients}
        return made, Moments(count, mu, nu)

    return optax.GradientTransformation(init, update)


class Momentum(NamedTuple):
    """The momentum by name."""

    momentum: Tree


def muon(config: settings.Muon) -> optax.GradientTransformation:
    """The orthogonalised momentum, as `unisono.optim.muon` has it; leading axes are a stack of matrices."""

    def init(parameters: Tree) -> Momentum:
        return Momentum(optax.tree.zeros_like(parameters))

    def update(gradients: Tree, state: Momentum, parameters: Any = None) -> tuple[Tree, Momentum]:
        momentum = optax.tree.update_moment(gradients, state.momentum, config.momentum, 1)
        directions = momentum
        if config.nesterov:
            directions = optax.tree.update_moment(momentum, gradients, 1 - config.momentum, 1)
        return {name: _orthogonalise(direction, config) for name, direction in directions.items()}, Momentum(momentum)

    return optax.GradientTransformation(init, update)


def _orthogonalise(matrix: jax.Array, config: settings.Muon) -> jax.Array:
    """A quintic Newton-Schulz iteration, and the factor of the learning rate for the shape."""
    rows, columns = matrix.shape[-2:]
    a, b, c = config.ns_coefficients
    lower = config.ns_dtype == "bf16" and matrix.dtype != jnp.float64
    wide = matrix.mT if rows > columns else matrix
    wide = wide.astype(jnp.bfloat16) if lower else wide
    norm = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    x = wide / jnp.maximum(norm, config.eps).astype(wide.dtype)
    for _ in range(config.ns_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = (x.mT if rows > columns else x).astype(matrix.dtype)
    scale = max(1.0, rows / columns) ** 0.5 if config.adjust_lr == "original" else 0.2 * max(rows, columns) ** 0.5
    return x * scale


class Factors(NamedTuple):
    """Steps made, and of the second moment the means of rows and of columns, or all of it for vectors, by name."""

    updates: jax.Array
    row: Tree
    column: Tree
    all: Tree


def adafactor(config: settings.Adafactor) -> optax.GradientTransformation:
    """The update of `torch.optim.Adafactor` (Shazeer & Stern, 2018) at a relative step of one.

    The matrix of an array of more axes is its last two, as in torch. The learning rate bounds the relative step, which
    `Optimizer` multiplies with.
    """

    def init(parameters: Tree) -> Factors:
        matrices = {name: p for name, p in parameters.items() if p.ndim > 1}
        vectors = {name: p for name, p in parameters.items() if p.ndim <= 1}
        return Factors(
            jnp.zeros([], jnp.int32),
            {name: jnp.zeros((*p.shape[:-1], 1), p.dtype) for name, p in matrices.items()},
            {name: jnp.zeros((*p.shape[:-2], 1, p.shape[-1]), p.dtype) for name, p in matrices.items()},
            {name: jnp.zeros_like(p) for name, p in vectors.items()},
        )

    def update(gradients: Tree, state: Factors, parameters: Any = None) -> tuple[Tree, Factors]:
        assert parameters is not None
        count = state.updates + 1
        new = Factors(count, {}, {}, {})
        made = {}
        for name, gradient in gradients.items():
            share = count.astype(gradient.dtype) ** config.beta2_decay
            least = config.eps[0] if config.eps[0] is not None else float(jnp.finfo(gradient.dtype).eps)
            squares = jnp.square(gradient)
            if gradient.ndim > 1:
                row = new.row[name] = _lerp(state.row[name], squares.mean(-1, keepdims=True), share)
                column = new.column[name] = _lerp(state.column[name], squares.mean(-2, keepdims=True), share)
                moment = (row * column) / jnp.maximum(row.mean(-2, keepdims=True), least)
            else:
                moment = new.all[name] = _lerp(state.all[name], squares, share)
            direction = gradient * jax.lax.rsqrt(jnp.maximum(moment, least * least))
            size = jnp.maximum(config.eps[1], _rms(parameters[name]))
            made[name] = direction * size / jnp.maximum(1.0, _rms(direction) / config.clip)
        return made, new

    return optax.GradientTransformation(init, update)


def _lerp(old: jax.Array, new: jax.Array, share: jax.Array) -> jax.Array:
    return old + share * (new - old)


def _rms(array: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.square(array).mean())
