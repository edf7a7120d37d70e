"""A variational auto-encoder: two losses, one of which is turned on slowly.

unisono train examples/vae.py optim.lr=3e-3
unisono train examples/vae.py optim.lr=3e-3 'schedules.kl={kind: constant, peak: 1.0, warmup: 0.5}'
unisono prove examples/vae.py:Shapes
"""

import numpy as np
import torch

import unisono


class Network(torch.nn.Module):
    """An encoder to means and log-variances, and a decoder."""

    def __init__(self, pixels, width, latent):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(pixels, width), torch.nn.GELU(), torch.nn.Linear(width, 2 * latent)
        )
        self.decoder = torch.nn.Sequential(
            torch.nn.Linear(latent, width), torch.nn.GELU(), torch.nn.Linear(width, pixels)
        )

    def forward(self, pixels, noise):
        mean, log_variance = self.encoder(pixels).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * noise
        return {"mean": mean, "log_variance": log_variance, "pixels": self.decoder(code)}


class Shapes(unisono.Task):
    """Blobs at random places of a small image."""

    class Config(unisono.Settings):
        width: int = 64
        latent: int = 4

    def rows(self, seed, count):
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[:8, :8]
        places = rng.uniform(1, 7, (count, 2, 1, 1))
        images = np.exp(-((y - places[:, 0]) ** 2 + (x - places[:, 1]) ** 2) / 4)
        return [{"pixels": image.ravel().astype(np.float32)} for image in images]

    def data(self):
        return self.rows(seed=0, count=1000)

    def held_out(self):
        return self.rows(seed=1, count=200)

    def sample(self, record, context):
        # Noise of a row, not of a micro-batch: no layout and no micro-batch changes it. Held-out rows have none.
        shape = self.config.latent
        noise = context.rng.normal(size=shape) if context.training else np.zeros(shape)
        return {**record, "noise": noise.astype(np.float32)}

    def build(self):
        return Network(64, self.config.width, self.config.latent)

    def outputs(self, model, batch, context):
        return model(batch["pixels"], batch["noise"])

    def loss(self, outputs, batch, context):
        mean, log_variance = outputs["mean"], outputs["log_variance"]
        pixels = (outputs["pixels"] - batch["pixels"]).square().sum()
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / 2
        weight = 0.01 * context.scalars.get("kl", 1.0)  # schedules.kl, a pure function of the step
        return unisono.Loss(
            {"pixels": pixels, "kl": kl},
            weights={"kl": weight},
            metrics={"error": (pixels, len(mean)), "nats": (kl, len(mean))},
        )
