"""A classifier of images: augmentation, class weights, label smoothing.

pip install scikit-learn
unisono train examples/images.py optim.lr=3e-3
unisono prove examples/images.py:Images
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import unisono


@cache
def digits():
    """1,797 handwritten digits of 8 x 8 pixels, which come with scikit-learn; of the eights only every tenth."""
    data = load_digits()
    rows = np.flatnonzero((data.target != 8) | (np.arange(len(data.target)) % 10 == 0))
    return data.images[rows].astype(np.float32) / 16, data.target[rows]


class Images(unisono.Task):
    """Which digit is it?"""

    class Config(unisono.Settings):
        width: int = 32
        shift: int = 1  # largest shift of an image, in pixels
        smoothing: float = 0.1
        balance: bool = True  # weigh classes by how rare they are

    def rows(self, *, held_out):
        images, labels = digits()
        counts = np.bincount(labels)
        weights = len(labels) / len(counts) / counts if self.config.balance else np.ones(len(counts))
        chosen = np.flatnonzero((np.arange(len(labels)) % 5 == 0) == held_out)
        return [{"image": images[row], "label": labels[row], "weight": weights[labels[row]]} for row in chosen]

    def data(self):
        return self.rows(held_out=False)

    def held_out(self):
        return self.rows(held_out=True)

    def sample(self, record, context):
        if not context.training:
            return record
        shift = self.config.shift  # the generator belongs to the row and its epoch: the same shift on any layout
        down, right = context.rng.integers(-shift, shift + 1, 2)
        return {**record, "image": np.roll(record["image"], (down, right), (0, 1))}

    def build(self):
        width = self.config.width
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, width, 3, padding=1),
            torch.nn.GELU(),
            torch.nn.Conv2d(width, width, 3, stride=2, padding=1),
            torch.nn.GELU(),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * width, 10),
        )

    def counts(self, batch):  # a row counts as much as it weighs; summed in fp64, as weights are
        return {"class": batch["weight"].sum()}

    def outputs(self, model, batch, context):
        return model(batch["image"][:, None])

    def loss(self, logits, batch, context):
        smoothing = self.config.smoothing if context.training else 0.0
        rows = F.cross_entropy(logits, batch["label"], reduction="none", label_smoothing=smoothing)
        right = (logits.argmax(1) == batch["label"]).sum()
        return unisono.Loss({"class": (rows * batch["weight"]).sum()}, metrics={"accuracy": (right, len(logits))})
