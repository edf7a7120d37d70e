"""The same transformer and rows for either engine, for `benchmarks/jax_overhead.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

import unisono

VOCABULARY, HEADS, ROWS = 1024, 4, 4096


class Size(unisono.Settings):
    """The size of the model, 0.7 M parameters unless changed.

    Attributes:
        width: of the residual stream.
        blocks: how many.
        length: tokens of a row, at most.
    """

    width: int = 128
    blocks: int = 3
    length: int = 64


class Base(unisono.Task):
    """Next tokens of random rows of different lengths; the first of a row is 0, and targets of -1 do not count."""

    Config = Size
    config: Size

    def data(self) -> list[np.ndarray]:
        rng, length = np.random.default_rng(0), self.config.length
        return [rng.integers(0, VOCABULARY, rng.integers(length // 2, length) + 1) for _ in range(ROWS)]

    def collate(self, samples: Any) -> dict[str, np.ndarray]:
        shape = len(samples), self.config.length
        tokens, targets = np.zeros(shape, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample) - 1], targets[row, : len(sample) - 1] = sample[:-1], sample[1:]
        return {"tokens": tokens, "targets": targets}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"next": float((batch["targets"] >= 0).sum())}


class InJax(Base):
    """In JAX."""

    engine = "jax"

    def build(self, key: Any) -> Any:
        import jax
        import jax.numpy as jnp

        width, blocks = self.config.width, self.config.blocks
        keys = iter(jax.random.split(key, 1 + 4 * blocks))

        def matrix(rows: int, columns: int) -> Any:
            return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

        def norm() -> dict[str, Any]:
            return {"weight": jnp.ones(width), "bias": jnp.zeros(width)}

        embedding = jax.random.normal(next(keys), (VOCABULARY, width)) * 0.1
        layers = [
            {
                "qkv": matrix(width, 3 * width), "out": matrix(width, width), "up": matrix(width, 4 * width),
                "down": matrix(4 * width, width), "first": norm(), "second": norm(),
            }
            for _ in range(blocks)
        ]  # fmt: skip
        return {"embedding": embedding, "blocks": layers, "norm": norm()}

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def normed(x: Any, norm: Any) -> Any:
            centred = x - x.mean(-1, keepdims=True)
            spread = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
            return centred * spread * norm["weight"] + norm["bias"]

        x = model["embedding"][batch["tokens"]]
        for block in model["blocks"]:
            parts = jnp.split(normed(x, block["first"]) @ block["qkv"], 3, axis=-1)
            q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in parts)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ block["out"]
            x = x + jax.nn.gelu(normed(x, block["second"]) @ block["up"]) @ block["down"]
        return normed(x, model["norm"]) @ model["embedding"].T

    def loss(self, outputs: Any, batch: Any, context: Any) -> unisono.Loss:
        import jax.numpy as jnp
        import optax

        targets = batch["targets"]
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(targets, 0))
        return unisono.Loss({"next": (losses * (targets >= 0)).sum(1)})


class InTorch(Base):
    """In torch."""

    def collate(self, samples: Any) -> dict[str, np.ndarray]:
        return {name: array.astype(np.int64) for name, array in super().collate(samples).items()}

    def build(self) -> Any:
        import torch
        from torch import nn
        from torch.nn import functional as F

        width, blocks = self.config.width, self.config.blocks

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
                self.up, self.down = (
                    nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False),
                )  # fmt: skip
                self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                parts = self.qkv(self.first(x)).chunk(3, -1)
                q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
                x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
                return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(VOCABULARY, width)
                nn.init.normal_(self.embedding.weight, std=0.1)
                self.blocks = nn.ModuleList(Block() for _ in range(blocks))
                self.norm = nn.LayerNorm(width)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                x = self.embedding(tokens)
                for block in self.blocks:
                    x = block(x)
                return self.norm(x) @ self.embedding.weight.T

        return Model()

    def outputs(self, model: Any, batch: Any, context: Any) -> Any:
        return model(batch["tokens"])

    def loss(self, outputs: Any, batch: Any, context: Any) -> unisono.Loss:
        from torch.nn import functional as F

        targets = batch["targets"].flatten()
        return unisono.Loss({"next": F.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=-1, reduction="sum")})
