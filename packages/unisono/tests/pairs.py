"""A small task whose loss crosses samples, in the three ways that there are of doing it."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.config.schema import Settings
from unisono.task import Context, Loss, Task

ROWS = 2 * 16 + 5
FEATURES, WIDTH = 6, 4
NOISE = 0.3


class Paired(Task):
    """Embeddings of rows: pairs regressed on a matrix of distances, contrasted, or as a whole made normal.

    Every row also has a target of its own, so that terms with pairs and without are mixed.
    """

    class Config(Settings):
        loss: Literal["distance", "contrast", "whole"] = "distance"
        dropout: float = 0.0

    config: Config

    @property
    def cross_sample(self) -> Literal["rows", "whole"]:  # type: ignore[override]
        return "whole" if self.config.loss == "whole" else "rows"

    def data(self) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(5)
        inputs = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
        return [{"x": x, "number": np.int64(number)} for number, x in enumerate(inputs)]

    def held_out(self) -> list[dict[str, np.ndarray]]:
        return self.data()[3:24]

    def distances(self) -> Tensor:  # (ROWS, ROWS)
        rng = np.random.default_rng(6)
        places = rng.normal(size=(ROWS, 2))
        return torch.from_numpy(np.tanh(np.linalg.norm(places[:, None] - places[None], axis=-1)))

    def weights(self, here: Tensor, rows: int) -> Tensor:  # (n,) -> (n, rows)
        """Of pairs of a row here and another one; those of a row add up to one."""
        return (torch.arange(rows)[None] != here[:, None]).double() / max(1, rows - 1)

    def build(self) -> nn.Module:
        dropout = nn.Dropout(self.config.dropout)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), dropout, nn.Linear(8, WIDTH))

    def counts(self, batch: Any) -> dict[str, float]:
        return {"across": float(len(batch["x"])), "own": float(len(batch["x"]))}

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> dict[str, Any]:
        embedding = 3 * model(batch["x"])
        other = 3 * model(batch["x"] + NOISE * torch.sin(7 * batch["x"]))
        return {"views": {"a": embedding, "b": other}, "error": (embedding.sum(1) - batch["x"].sum(1)).square()}

    def shared(self, batch: Any) -> dict[str, Any]:
        return {"number": batch["number"]}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        own = outputs["error"].sum()
        if self.config.loss == "whole":
            size = len(outputs["error"])
            across = normality(outputs["views"]["a"]) * size
            return Loss({"across": across, "own": own}, {"own": 0.1}, {"first": (batch["number"][0] * 1.0, 1)})
        assert context.global_batch is not None
        every, first = context.global_batch, context.global_batch.first
        a, b = outputs["views"]["a"], every.outputs["views"]["b"]
        here = torch.arange(first, first + len(a))
        if self.config.loss == "contrast":
            logits = F.normalize(a) @ F.normalize(b).T / 0.3
            right = (logits.argmax(1) == here).sum()
            return Loss({"across": F.cross_entropy(logits, here, reduction="sum"), "own": own}, {"own": 0.1},
                        {"right": (right, len(a))})  # fmt: skip
        target = self.distances().to(a.dtype)[batch["number"]][:, every.batch["number"]]
        squares = (a[:, None] - every.outputs["views"]["a"][None]).square().sum(-1)
        predicted = torch.tanh(squares.clamp_min(1e-8).sqrt() / 10)
        pairs = self.weights(here, len(b))
        across = ((predicted - target).square() * pairs).sum()
        return Loss({"across": across, "own": own}, {"own": 0.1}, {"distance": ((predicted * pairs).sum(), len(a))})


def normality(embedding: Tensor) -> Tensor:
    """How far random projections are from normal, by their characteristic functions; it splits into no rows."""
    directions = F.normalize(torch.randn(embedding.shape[1], 5, dtype=embedding.dtype), dim=0)
    points = torch.tensor([0.5, 1.0, 2.0], dtype=embedding.dtype)
    angles = (embedding @ directions)[..., None] * points  # (rows, directions, points)
    wanted = torch.exp(-points.square() / 2)
    return ((angles.cos().mean(0) - wanted).square() + angles.sin().mean(0).square()).sum()
