"""A task whose every number can be counted by hand."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from unisono import Loss, Task

WIDTH, BLOCKS, CLASSES, ROWS = 128, 3, 256, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.trunc_normal_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SmallTask(Task):
    def data(self):
        return range(ROWS)

    def sample(self, record, context):
        generator = np.random.default_rng(record)
        return generator.standard_normal(WIDTH).astype("float32"), record % CLASSES

    def collate(self, samples):
        return {"x": np.stack([x for x, _ in samples]), "y": np.array([y for _, y in samples])}

    def build(self):
        return Net()

    def outputs(self, model, batch, context):
        return model(batch["x"])

    def loss(self, outputs, batch, context):
        return Loss({"nll": nn.functional.cross_entropy(outputs, batch["y"], reduction="sum")})

    def work(self, batch):
        return {"tokens": float(len(batch["x"])), "flops": 6.0 * PARAMETERS * len(batch["x"])}


class PeekingTask(SmallTask):
    def outputs(self, model, batch, context):
        outputs = super().outputs(model, batch, context)
        return outputs * (2 if outputs.sum() > 0 else 1)


BLOCK = [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
HEAD = [(CLASSES, WIDTH), (CLASSES,)]
PARAMETERS = BLOCKS * sum(int(np.prod(shape)) for shape in BLOCK) + sum(int(np.prod(shape)) for shape in HEAD)
