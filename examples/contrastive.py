"""Contrastive pairs: each row against all rows of the global batch, whichever process has them.

unisono train examples/contrastive.py optim.lr=3e-3 train.global_batch=64
unisono prove examples/contrastive.py:Pairs
"""

import numpy as np
import torch
import torch.nn.functional as F

import unisono


class Towers(torch.nn.Module):
    """Two encoders into one space."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = (
            torch.nn.Sequential(torch.nn.Linear(size, width), torch.nn.GELU(), torch.nn.Linear(width, 16))
            for size in (12, 20)
        )

    def forward(self, left, right):
        return {"left": F.normalize(self.left(left), dim=1), "right": F.normalize(self.right(right), dim=1)}


class Pairs(unisono.Task):
    """Two noisy views of one hidden vector: which right view belongs to which left one?"""

    cross_sample = "rows"

    class Config(unisono.Settings):
        width: int = 64
        temperature: float = 0.1

    def rows(self, seed, count):
        views = np.random.default_rng(0)
        left, right = views.normal(size=(6, 12)), views.normal(size=(6, 20))
        rng = np.random.default_rng(seed)
        hidden = rng.normal(size=(count, 6))
        noise = [0.3 * rng.normal(size=(count, size)) for size in (12, 20)]
        sides = (hidden @ left + noise[0]).astype(np.float32), (hidden @ right + noise[1]).astype(np.float32)
        return [{"left": a, "right": b} for a, b in zip(*sides, strict=True)]

    def data(self):
        return self.rows(seed=1, count=2000)

    def held_out(self):
        return self.rows(seed=2, count=320)

    def build(self):
        return Towers(self.config.width)

    def outputs(self, model, batch, context):  # gathered from all processes; gradients flow back
        return model(batch["left"], batch["right"])

    def loss(self, outputs, batch, context):
        everywhere = context.global_batch
        logits = outputs["left"] @ everywhere.outputs["right"].T / self.config.temperature
        here = torch.arange(everywhere.first, everywhere.first + len(logits), device=logits.device)
        right = (logits.argmax(1) == here).sum()
        total = F.cross_entropy(logits, here, reduction="sum")
        return unisono.Loss({"pair": total}, metrics={"found": (right, len(logits))})
