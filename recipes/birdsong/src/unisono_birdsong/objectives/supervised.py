"""Labels: the head on embeddings that the supervised objective and every probe have, and the losses, by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.model.layers import linear
from unisono_birdsong.objectives import Seen
from unisono_birdsong.settings import Asymmetric


class ClassHead(eqx.Module):
    """A normalisation and one layer, from an embedding to a logit of each class."""

    norm: eqx.nn.LayerNorm
    output: eqx.nn.Linear

    def __init__(self, width: int, classes: int, key: Array) -> None:
        self.norm, self.output = eqx.nn.LayerNorm(width), linear(width, classes, key)

    def __call__(self, embedding: Array) -> Array:
        """(width,) to (classes,), in fp32 at least."""
        logits = self.output(self.norm(embedding))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


class Supervised(eqx.Module):
    """Logits of the classes, by a head whose gradient reaches the encoder."""

    head: ClassHead

    def __init__(self, width: int, classes: int, key: Array) -> None:
        self.head = ClassHead(width, classes, key)

    def __call__(self, encoder: Encoder, batch: Mapping[str, Any]) -> Seen:
        """Look at clips (rows, frames, mels); gives `logits` (rows, classes)."""
        embeddings = jax.vmap(encoder.embedding)(batch["clip"])
        return Seen({"logits": jax.vmap(self.head)(embeddings)}, embeddings[:, None])


def cross_entropy(logits: Array, label: Array) -> Array:
    """Of logits (rows, classes) with labels (rows,), in nats, (rows,); 0 where a label is negative, or unknown."""
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(label, 0)[:, None], axis=1)[:, 0]
    return jnp.where(label >= 0, loss, 0.0)


def asymmetric(logits: Array, labels: Array, settings: Asymmetric) -> Array:
    """The asymmetric loss of several labels (Ridnik et al., 2021, eq. 7), the sum over classes, (rows,).

    A positive costs (1 − p)^γ₊ · −log p, a negative p_m^γ₋ · −log(1 − p_m) with p_m = max(p − clip, 0). Logits are
    (rows, classes), as are labels, which are above 0 where a class is there.
    """
    p = jax.nn.sigmoid(logits)
    positive = jnp.power(1 - p, settings.positive) * -jax.nn.log_sigmoid(logits)
    shifted = jnp.maximum(p - settings.clip, 0.0)
    # Where clip is 0, 1 − p loses all digits of a sure mistake, so its logarithm comes from the logit.
    costs = -jax.nn.log_sigmoid(-logits) if settings.clip == 0 else -jnp.log1p(-shifted)
    above = jnp.where(shifted > 0, shifted, 1.0)  # a power of 0 has no gradient where the exponent is below 1
    focus = jnp.where(shifted > 0, jnp.power(above, settings.negative), 0.0)
    return jnp.where(labels > 0, positive, focus * costs).sum(axis=1)
