"""Labels: a head on the embedding of each clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
from jax import Array

from unisono.recipes.birdsong.model.encoder import Encoder
from unisono.recipes.birdsong.model.heads import ClassHead
from unisono.recipes.birdsong.objectives.base import Seen


class Supervised(eqx.Module):
    """Logits of the classes, by a head whose gradient reaches the encoder.

    Args:
        width: features of an embedding.
        classes: how many.
        key: of the first weights.
    """

    head: ClassHead

    def __init__(self, width: int, classes: int, key: Array) -> None:
        self.head = ClassHead(width, classes, key)

    def __call__(self, encoder: Encoder, batch: Mapping[str, Any]) -> Seen:
        """Look at clips (rows, frames, mels); gives `logits` (rows, classes)."""
        embeddings = jax.vmap(encoder.embedding)(batch["clip"])
        return Seen({"logits": jax.vmap(self.head)(embeddings)}, embeddings[:, None])
