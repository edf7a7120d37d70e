"""The rows of the small tasks that tests train, in torch (`tasks`) and in JAX (`jax_tasks`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.config.schema import Settings
from unisono.task import SampleContext, Task

VOCABULARY = 61
LENGTH = 12
WIDTH = 16


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


class TransformerRows(Task):
    """Rows of tokens, the last of which is augmented."""

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


class LinearRows(Task):
    """Rows of numbers and their sum."""

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
