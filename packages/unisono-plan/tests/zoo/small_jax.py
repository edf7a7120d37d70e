"""The same network in JAX, so that its numbers can be counted by hand as well."""

from __future__ import annotations

import equinox as eqx
import jax
import numpy as np
import optax

from unisono import Loss, Task

WIDTH, BLOCKS, CLASSES, ROWS = 128, 3, 256, 4096


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=first)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=second)

    def __call__(self, x):
        return x + jax.vmap(self.down)(jax.nn.relu(jax.vmap(self.up)(x)))


class Net(eqx.Module):
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, BLOCKS + 1)
        self.blocks = [Block(one) for one in keys]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=last)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


class SmallJaxTask(Task):
    engine = "jax"

    def data(self):
        return range(ROWS)

    def sample(self, record, context):
        generator = np.random.default_rng(record)
        return generator.standard_normal(WIDTH).astype("float32"), record % CLASSES

    def collate(self, samples):
        return {"x": np.stack([x for x, _ in samples]), "y": np.array([y for _, y in samples])}

    def build(self, key):
        return Net(key)

    def outputs(self, model, batch, context):
        return model(batch["x"])

    def loss(self, outputs, batch, context):
        return Loss({"nll": optax.softmax_cross_entropy_with_integer_labels(outputs, batch["y"])})
