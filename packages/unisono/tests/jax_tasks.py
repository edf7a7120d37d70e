"""Small tasks in JAX: everything that makes layouts differ is in them on purpose, as in `tasks`."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from packages.unisono.tests.rows import LENGTH, VOCABULARY, WIDTH, LinearRows, TransformerRows
from unisono.config.schema import Settings
from unisono.task import Context, Loss, SampleContext, Task


def dropped(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    if not rate:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    dropout: float

    def __init__(self, dropout: float, key: jax.Array) -> None:
        one, two, three = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(
            2, WIDTH, use_query_bias=True, use_key_bias=True, use_value_bias=True, use_output_bias=True, key=one
        )
        self.norms = (eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH))
        self.up, self.down = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=two), eqx.nn.Linear(4 * WIDTH, WIDTH, key=three)
        self.dropout = dropout

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:  # (length, width)
        first, second = jax.random.split(key)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        normed = jax.vmap(self.norms[0])(x)
        x = x + self.drop(self.attention(normed, normed, normed, mask), first)
        wide = jax.vmap(self.up)(jax.vmap(self.norms[1])(x))
        return x + self.drop(jax.vmap(self.down)(jax.nn.gelu(wide)), second)

    def drop(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return dropped(x, self.dropout, key)


class Transformer(eqx.Module):
    embedding: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    scale: float = eqx.field(static=True, default=1.0)

    def __init__(self, dropout: float, key: jax.Array, blocks: int = 2) -> None:
        first, *rest = jax.random.split(key, blocks + 1)
        self.embedding = jax.random.normal(first, (VOCABULARY, WIDTH)) * 0.3
        self.blocks = [Block(dropout, one) for one in rest]
        self.norm = eqx.nn.LayerNorm(WIDTH)

    def __call__(self, tokens: jax.Array, key: jax.Array) -> jax.Array:  # (length,) -> (length, vocabulary)
        x = self.embedding[tokens]
        for block, one in zip(self.blocks, jax.random.split(key, len(self.blocks)), strict=True):
            x = block(x, one)
        return jax.vmap(self.norm)(x) @ self.embedding.T  # tied


class TransformerTask(TransformerRows):
    """Next-token prediction with two terms of different weight, and a metric."""

    engine = "jax"

    def build(self, key: jax.Array) -> Transformer:
        return Transformer(self.config.dropout, key)

    def outputs(self, model: Transformer, batch: Any, context: Context) -> Any:
        keys = jax.random.split(context.key, len(batch["tokens"]))
        model = model if context.training else eqx.tree_at(lambda m: [b.dropout for b in m.blocks], model, [0.0, 0.0])
        return jax.vmap(model)(batch["tokens"][:, :-1], keys)

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        targets = batch["tokens"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        real = targets != 0
        predicted = outputs.mean(axis=(1, 2)) - batch["lengths"] / LENGTH
        hits = ((outputs.argmax(-1) == targets) & real).sum(1)
        return Loss(
            {"next": (losses * real).sum(1), "length": jnp.square(predicted)},
            weights={"length": self.config.embedding_penalty},
            metrics={"accuracy": (hits, real.sum(1))},
        )


class UnevenTask(Task):
    """A small network with dropout; rows have different numbers of targets, one of them none."""

    engine = "jax"

    class Config(Settings):
        rows: int = 27
        dropout: float = 0.0

    config: Config

    def rows_of(self, seed: int, count: int) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(count, 5)), rng.normal(size=(count, 6))
        real = np.arange(6) < rng.integers(1, 7, size=(count, 1))
        real[3] = False
        parts = zip(x.astype(np.float32), y.astype(np.float32), real, strict=True)
        return [{"x": a, "y": b, "real": c} for a, b, c in parts]

    def data(self) -> list[dict[str, np.ndarray]]:
        return self.rows_of(1, self.config.rows)

    def held_out(self) -> list[dict[str, np.ndarray]]:
        return self.rows_of(2, 11)

    def sample(self, record: Any, context: SampleContext) -> Any:
        if not context.training:
            return record
        return {**record, "x": record["x"] + context.rng.normal(scale=0.1, size=5).astype(np.float32)}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"near": float(batch["real"].sum()), "size": float(len(batch["x"]))}

    def work(self, batch: Any) -> dict[str, float]:
        return {"targets": float(batch["real"].sum())}

    def build(self, key: jax.Array) -> Any:
        one, two = jax.random.split(key)
        return {"up": jax.random.normal(one, (5, 8)), "bias": jnp.zeros(8), "down": jax.random.normal(two, (8, 6))}

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        hidden = jnp.tanh(batch["x"] @ model["up"] + model["bias"])
        rate = self.config.dropout if context.training else 0.0
        return dropped(hidden, rate, context.key) @ model["down"]

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        errors = jnp.square(outputs - batch["y"]) * batch["real"]
        return Loss(
            {"near": errors.sum(1), "size": jnp.square(outputs).mean(1)},
            weights={"size": 0.3},
            metrics={"close": (((errors < 0.5) & batch["real"]).sum(1), batch["real"].sum(1))},
        )


class LinearTask(LinearRows):
    """Least squares; enough for tests of the machinery around the step."""

    engine = "jax"

    def build(self, key: jax.Array) -> Any:
        return {"weight": jax.random.normal(key, (self.config.features, 1)), "bias": jnp.zeros(1)}

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        return batch["x"] @ model["weight"] + model["bias"]

    def loss(self, outputs: jax.Array, batch: Any, context: Context) -> Loss:
        return Loss({"square": jnp.square(outputs - batch["y"]).sum(1)})
