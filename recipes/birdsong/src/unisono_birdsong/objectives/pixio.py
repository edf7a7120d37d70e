"""Pixio: a masked autoencoder. The encoder sees a quarter of the patches, a small decoder tells the others.

After Yang et al., "In Pursuit of Pixel Supervision for Visual Pre-training" (2025), which is He et al.'s MAE (2022)
with larger blocks hidden and a deeper decoder. Targets are patches, each normalised by its own mean and variance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from unisono_birdsong.model.encoder import Encoded, Encoder, patches_of, pooled
from unisono_birdsong.model.layers import Block, Turns, grid_turns, linear, run_blocks
from unisono_birdsong.objectives import Seen
from unisono_birdsong.settings import EncoderSettings, Pixio

_EPSILON = 1e-6  # of a patch's variance


class Masked(eqx.Module):
    """The decoder, and the token that stands where nothing was seen."""

    enter: eqx.nn.Linear
    hidden_token: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    leave: eqx.nn.Linear
    settings: Pixio = eqx.field(static=True)

    def __init__(self, encoder: EncoderSettings, settings: Pixio, key: Array) -> None:
        enter, leave, *blocks = jax.random.split(key, 2 + settings.depth)
        self.enter = linear(encoder.width, settings.width, enter)
        self.hidden_token = jnp.zeros(settings.width)
        self.blocks = [
            Block(settings.width, settings.heads, 4.0, gated=False, qk_norm=False, scale=None, key=one)
            for one in blocks
        ]
        self.norm = eqx.nn.LayerNorm(settings.width)
        self.leave = linear(settings.width, encoder.patch[0] * encoder.patch[1], leave)
        self.settings = settings

    def __call__(self, encoder: Encoder, batch: Mapping[str, Any]) -> Seen:
        """Look at clips (rows, frames, mels) with an `order` (rows, patches); gives `reconstruction`, (rows,)."""

        def one(clip: Array, order: Array) -> tuple[Array, Array]:
            visible, hidden = jnp.split(order, [len(order) - masked_patches(encoder.settings, self.settings)])
            encoded = encoder(clip, visible)
            truth = targets(patches_of(clip, encoder.settings.patch)[hidden])
            predicted = self.decode(encoder.settings, encoded, order)[hidden].astype(truth.dtype)
            return jnp.square(predicted - truth).mean(), pooled(encoded)

        errors, embeddings = jax.vmap(one)(batch["clip"], batch["order"])
        return Seen({"reconstruction": errors}, embeddings[:, None])

    def decode(self, encoder: EncoderSettings, encoded: Encoded, order: Array) -> Array:
        """What the decoder tells of every patch of one clip, (patches, numbers of a patch).

        `encoder` is its settings, and `order` (patches,) of all patches, the visible ones first.
        """
        tokens = jax.vmap(self.enter)(jnp.concatenate([encoded.cls, encoded.patches]))
        before = len(encoded.cls)
        # One gather puts everything in its place: patch p is the one whose number in the order is p's.
        unseen = jnp.broadcast_to(self.hidden_token, (len(order) - len(encoded.patches), self.settings.width))
        filled = jnp.concatenate([tokens[before:], unseen])[jnp.argsort(order)]
        size = self.settings.width // self.settings.heads
        turns = Turns(*grid_turns(encoder.grid, size, encoder.rope_base, before))
        x = run_blocks(self.blocks, jnp.concatenate([tokens[:before], filled]), turns)
        return jax.vmap(lambda token: self.leave(self.norm(token)))(x[before:])


def masked_patches(encoder: EncoderSettings, settings: Pixio) -> int:
    """How many patches of a clip are hidden."""
    return round(settings.masked * encoder.grid[0] * encoder.grid[1])


def targets(patches: Array) -> Array:
    """Patches (patches, numbers of a patch), each with mean 0 and variance 1, in fp32 at least."""
    patches = patches.astype(jnp.promote_types(patches.dtype, jnp.float32))
    mean, variance = patches.mean(axis=1, keepdims=True), patches.var(axis=1, keepdims=True)
    return (patches - mean) / jnp.sqrt(variance + _EPSILON)
