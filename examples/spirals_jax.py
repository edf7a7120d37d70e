"""A task of one's own in JAX: which of two spirals does a point lie on?

unisono train examples/spirals_jax.py:Spirals optim.lr=3e-3
unisono train examples/spirals_jax.py:Spirals optim.lr=3e-3 layout.devices=4 layout.strategy=fsdp task.width=128
"""

import equinox as eqx
import jax
import numpy as np
import optax

import unisono


class Spirals(unisono.Task):
    """Binary classification with a small network."""

    engine = "jax"

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

    def build(self, key):
        return eqx.nn.MLP(2, "scalar", self.config.width, depth=2, activation=jax.nn.gelu, key=key)

    def outputs(self, model, batch, context):
        return jax.vmap(model)(batch["point"])

    def loss(self, logits, batch, context):  # one number per row; the engine adds them up
        losses = optax.sigmoid_binary_cross_entropy(logits, batch["side"])
        right = (logits > 0) == (batch["side"] > 0)
        return unisono.Loss({"side": losses}, metrics={"accuracy": (right, context.valid)})


if __name__ == "__main__":
    result = unisono.train(Spirals, {"train.steps": 1000, "optim.lr": 3e-3})
    print(result.folder, result.evaluation)
