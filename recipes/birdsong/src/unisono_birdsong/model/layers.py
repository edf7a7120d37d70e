"""The blocks of a pre-norm vision transformer, on one row at a time: arrays are (tokens, features)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

_TOKEN_STD = 0.02  # of first tokens and places, as in ViT


class Turns(NamedTuple):
    """Cosines and sines that queries and keys are turned by, (tokens, 1, features of a head / 2) each."""

    cos: Array
    sin: Array

    def __call__(self, x: Array) -> Array:
        """Turn (tokens, heads, features of a head)."""
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = self.cos.astype(x.dtype), self.sin.astype(x.dtype)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def grid_turns(grid: tuple[int, int], size: int, base: float, before: int) -> tuple[Array, Array]:
    """Angles of a 2-D rotary embedding (Su et al., 2021; in two dimensions as in Heo et al., 2024).

    One half of a head's features turns with the place in time, the other with that in frequency; the `before` tokens
    that have no place are not turned.

    Returns:
        Cosines and sines, (before + patches, 1, size / 2) each, as NumPy computes them in fp64.
    """
    rates = base ** -(np.arange(size // 4) / (size // 4))
    places = np.stack(np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij"), axis=-1).reshape(-1, 2)
    angles = (places[:, :, None] * rates).reshape(len(places), size // 2)
    angles = np.concatenate([np.zeros((before, size // 2)), angles])[:, None]
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


class Attention(eqx.Module):
    """Attention of all tokens to all, with queries and keys that may be normalised and turned."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    query_norm: eqx.nn.RMSNorm | None
    key_norm: eqx.nn.RMSNorm | None
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, qk_norm: bool, key: Array) -> None:
        self.query, self.key, self.value, self.output = (linear(width, width, k) for k in jax.random.split(key, 4))
        if not qk_norm:  # a bias of all keys moves no attention, so its gradient would be rounding alone
            self.key = eqx.tree_at(lambda layer: layer.bias, self.key, None)
        size = width // heads
        self.query_norm = eqx.nn.RMSNorm(size, use_bias=False) if qk_norm else None
        self.key_norm = eqx.nn.RMSNorm(size, use_bias=False) if qk_norm else None
        self.heads = heads

    def __call__(self, x: Array, turns: Turns | None) -> Array:
        """(tokens, width) to the same shape."""
        query, key, value = (
            jax.vmap(part)(x).reshape(len(x), self.heads, -1) for part in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = jax.vmap(jax.vmap(self.query_norm))(query), jax.vmap(jax.vmap(self.key_norm))(key)
        if turns is not None:
            query, key = turns(query), turns(key)
        mixed = _attend(query, key, value)
        return jax.vmap(self.output)(mixed.reshape(len(x), -1))


def _attend(query: Array, key: Array, value: Array) -> Array:
    """Scaled dot product attention, (tokens, heads, features of a head); JAX's own scores in fp32 even in fp64."""
    scores = attention_scores(query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores).astype(value.dtype), value)


@jax.custom_vjp
def attention_scores(query: Array, key: Array) -> Array:
    """Products of queries and keys, at least in fp32, (heads, tokens, tokens).

    Their gradient is cast before it is multiplied, as flash attention does it. JAX would multiply in fp32 instead, two
    of the five products of an attention that a run in bf16 would then not have in bf16.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("tnh,snh->nts", query, key, preferred_element_type=wide)


def _keep_operands(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return attention_scores(query, key), (query, key)


def _multiply_back(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    query, key = kept
    gradient = gradient.astype(query.dtype)
    return jnp.einsum("nts,snh->tnh", gradient, key), jnp.einsum("nts,tnh->snh", gradient, query)


attention_scores.defvjp(_keep_operands, _multiply_back)


class Mlp(eqx.Module):
    """Two layers with a GELU, or the gated three of SwiGLU (Shazeer, 2020)."""

    up: eqx.nn.Linear
    gate: eqx.nn.Linear | None
    down: eqx.nn.Linear

    def __init__(self, width: int, expansion: float, gated: bool, key: Array) -> None:
        inner = -(-round(width * expansion * (2 / 3 if gated else 1)) // 8) * 8
        one, two, three = jax.random.split(key, 3)
        self.up, self.down = linear(width, inner, one), linear(inner, width, two)
        self.gate = linear(width, inner, three) if gated else None

    def __call__(self, x: Array) -> Array:
        """(width,) to the same shape."""
        inner = self.up(x)
        inner = jax.nn.gelu(inner) if self.gate is None else jax.nn.silu(self.gate(x)) * inner
        return self.down(inner)


class Block(eqx.Module):
    """Attention and an MLP on normalised tokens, added to them, scaled by LayerScale (Touvron et al., 2021)."""

    attention_norm: eqx.nn.LayerNorm
    attention: Attention
    attention_scale: Array | None
    mlp_norm: eqx.nn.LayerNorm
    mlp: Mlp
    mlp_scale: Array | None

    def __init__(
        self, width: int, heads: int, expansion: float, *, gated: bool, qk_norm: bool, scale: float | None, key: Array
    ) -> None:
        one, two = jax.random.split(key)
        self.attention_norm, self.mlp_norm = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = Attention(width, heads, qk_norm, one)
        self.mlp = Mlp(width, expansion, gated, two)
        self.attention_scale = None if scale is None else jnp.full((width,), scale)
        self.mlp_scale = None if scale is None else jnp.full((width,), scale)

    def __call__(self, x: Array, turns: Turns | None) -> Array:
        """(tokens, width) to the same shape."""
        added = self.attention(jax.vmap(self.attention_norm)(x), turns)
        x = x + (added if self.attention_scale is None else added * self.attention_scale)
        added = jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))
        return x + (added if self.mlp_scale is None else added * self.mlp_scale)


def run_blocks(blocks: Sequence[Any], x: Array, turns: Turns | None) -> Array:
    """Blocks one after another on (tokens, width), compiled once: a scan over their stacked arrays.

    They are kept apart, so that each has its names, its decay and its own activation checkpointing; where that is on
    for every k-th block, a turn of the scan is k blocks.
    """
    trees = [jax.tree.structure(block) for block in blocks]
    period = next(p for p in range(1, len(blocks) + 1) if trees[p:] == trees[:-p])
    whole = len(blocks) // period * period
    arrays, rest = zip(*(eqx.partition(block, eqx.is_array) for block in blocks), strict=True)
    stacked = [jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays[n:whole:period]) for n in range(period)]

    def turn(x: Array, given: list[Any]) -> tuple[Array, None]:
        for part, static in zip(given, rest, strict=False):
            x = eqx.combine(part, static)(x, turns)
        return x, None

    x, _ = jax.lax.scan(turn, x, stacked)
    for block in blocks[whole:]:
        x = block(x, turns)
    return x


def linear(inputs: int, outputs: int, key: Array) -> eqx.nn.Linear:
    """A layer whose first weights keep the variance of its input (LeCun), without a first bias."""
    weight = jax.random.truncated_normal(key, -2, 2, (outputs, inputs)) / inputs**0.5
    layer = eqx.nn.Linear(inputs, outputs, key=key)
    changed: eqx.nn.Linear = eqx.tree_at(lambda one: (one.weight, one.bias), layer, (weight, jnp.zeros(outputs)))
    return changed


def table(rows: int, width: int, key: Array) -> eqx.nn.Embedding:
    """Learnt tokens or places; an embedding, so that they do not decay."""
    return eqx.nn.Embedding(weight=_TOKEN_STD * jax.random.truncated_normal(key, -2, 2, (rows, width)))
