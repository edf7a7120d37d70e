"""Small tasks that tests train: everything that makes layouts differ is in them on purpose.

Rows have different numbers of targets, the model has dropout, a tied head, and a key bias whose true gradient is zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from unisono.config.schema.base import Settings
from unisono.task import Context, Loss, SampleContext, Task

VOCABULARY = 61
LENGTH = 12
WIDTH = 16


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (rows, length, width)
        rows, length, _ = x.shape
        q, k, v = (
            part(x).view(rows, length, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = Attention()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        wide = self.up(self.norms[1](x)).to(torch.float32)  # models do cast inside; under fp64 it must not count
        return x + self.dropout(self.down(F.gelu(wide).to(x.dtype)))


class Transformer(nn.Module):
    def __init__(self, dropout: float, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Words:
    """Rows of random tokens, of different lengths, one of them without a single target."""

    def __init__(self, rows: int) -> None:
        rng = np.random.default_rng(7)
        self.rows = [rng.integers(1, VOCABULARY, size=rng.integers(2, LENGTH + 1)) for _ in range(rows)]
        self.rows[3] = self.rows[3][:1]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.rows[row]


class TransformerTask(Task):
    """Next-token prediction with two terms of different weight, and a metric."""

    class Config(Settings):
        rows: int = 27
        dropout: float = 0.0
        embedding_penalty: float = 0.3

    config: Config

    def data(self) -> Words:
        return Words(self.config.rows)

    def held_out(self) -> Words:
        return Words(11)

    def sample(self, record: np.ndarray, context: SampleContext) -> np.ndarray:
        if not context.training:
            return record
        augmented = np.array(record)
        augmented[-1] = context.rng.integers(1, VOCABULARY)
        return augmented

    def collate(self, samples: Any) -> dict[str, Any]:
        tokens = np.zeros((len(samples), LENGTH + 1), dtype=np.int64)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample)] = sample
        return {"tokens": tokens, "lengths": np.array([len(sample) for sample in samples], dtype=np.float32)}

    def counts(self, batch: Any) -> dict[str, float]:
        return {"next": float((batch["tokens"][:, 1:] != 0).sum()), "length": float(len(batch["tokens"]))}

    def work(self, batch: Any) -> dict[str, float]:
        return {"tokens": float((batch["tokens"] != 0).sum())}

    def build(self) -> nn.Module:
        return Transformer(self.config.dropout)

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return model(batch["tokens"][:, :-1])

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        targets = batch["tokens"][:, 1:]
        losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        predicted = outputs.mean(dim=(1, 2)) - batch["lengths"] / LENGTH
        hits = ((outputs.argmax(-1) == targets) & (targets != 0)).sum()
        return Loss(
            {"next": losses, "length": predicted.square().sum()},
            weights={"length": self.config.embedding_penalty},
            metrics={"accuracy": (hits, (targets != 0).sum())},
        )


class LinearTask(Task):
    """Least squares; enough for tests of the machinery around the step."""

    class Config(Settings):
        rows: int = 40
        features: int = 3

    config: Config

    def data(self) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(1)
        inputs = rng.normal(size=(self.config.rows, self.config.features)).astype(np.float32)
        return [{"x": x, "y": x.sum(keepdims=True)} for x in inputs]

    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": float(len(batch["x"]))}

    def build(self) -> nn.Module:
        return nn.Linear(self.config.features, 1)

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return model(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().sum()})
