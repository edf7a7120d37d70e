"""A task of one's own: which of two spirals does a point lie on?

unisono train examples/spirals.py:Spirals optim.lr=3e-3
unisono train examples/spirals.py:Spirals optim.lr=3e-3 layout.world_size=2 layout.strategy=fsdp task.width=128
"""

import numpy as np
import torch
import torch.nn.functional as F

import unisono


class Spirals(unisono.Task):
    """Binary classification with a small network."""

    class Config(unisono.Settings):
        """Settings of the task; `task.width=128` on the command line."""

        width: int = 64
        noise: float = 0.05

    def points(self, seed: int, count: int) -> list[dict[str, np.ndarray]]:
        rng = np.random.default_rng(seed)
        side = rng.integers(0, 2, count)
        turn = 2 * np.pi * np.sqrt(rng.random(count))
        xy = np.stack([np.cos(turn), np.sin(turn)], 1) * (turn * (1 - 2 * side) / 7)[:, None]
        return [{"point": p.astype(np.float32), "side": s.astype(np.float32)} for p, s in zip(xy, side, strict=True)]

    def data(self):
        return self.points(seed=0, count=2000)

    def held_out(self):
        return self.points(seed=1, count=500)

    def sample(self, record, context):
        if not context.training:  # held-out rows stay as they are
            return record
        # The generator is keyed by the row and its epoch: the same noise on any layout, another one in each epoch.
        noise = context.rng.normal(scale=self.config.noise, size=2).astype(np.float32)
        return {**record, "point": record["point"] + noise}

    def build(self):
        width = self.config.width
        layers = [torch.nn.Linear(2, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))

    def outputs(self, model, batch, context):
        return model(batch["point"]).squeeze(1)

    def loss(self, logits, batch, context):
        total = F.binary_cross_entropy_with_logits(logits, batch["side"], reduction="sum")
        right = ((logits > 0) == (batch["side"] > 0)).sum()
        return unisono.Loss({"side": total}, metrics={"accuracy": (right, len(logits))})


if __name__ == "__main__":
    result = unisono.train(Spirals, {"train.steps": 1000, "optim.lr": 3e-3})
    print(result.folder, result.evaluation)
