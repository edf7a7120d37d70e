"""Small tasks that tests train: everything that makes layouts differ is in them on purpose.

Rows have different numbers of targets, the model has dropout, a tied head, and a key bias whose true gradient is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from packages.unisono.tests.rows import LENGTH, VOCABULARY, WIDTH, LinearRows, TransformerRows
from packages.unisono.tests.rows import Words as Words
from unisono.task import Context, Loss


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


class TransformerTask(TransformerRows):
    """Next-token prediction with two terms of different weight, and a metric."""

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


class LinearTask(LinearRows):
    """Least squares; enough for tests of the machinery around the step."""

    def build(self) -> nn.Module:
        return nn.Linear(self.config.features, 1)

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return model(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().sum()})
