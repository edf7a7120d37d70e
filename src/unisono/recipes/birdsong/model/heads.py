"""What reads embeddings: the head of the supervised objective, and the probe that learns beside every objective."""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp
from jax import Array

from unisono.recipes.birdsong.model.layers import linear


class ClassHead(eqx.Module):
    """A normalisation and one layer, from an embedding to a logit of each class.

    Args:
        width: features of an embedding.
        classes: how many.
        key: of the first weights.
    """

    norm: eqx.nn.LayerNorm
    output: eqx.nn.Linear

    def __init__(self, width: int, classes: int, key: Array) -> None:
        self.norm, self.output = eqx.nn.LayerNorm(width), linear(width, classes, key)

    def __call__(self, embedding: Array) -> Array:
        """(width,) to (classes,), in fp32 at least."""
        logits = self.output(self.norm(embedding))
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
