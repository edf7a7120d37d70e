"""The encoder: a pre-norm vision transformer on the patches of one spectrogram."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from unisono_birdsong.model.layers import Block, Turns, grid_turns, linear, run_blocks, table
from unisono_birdsong.settings import EncoderSettings


class Encoded(NamedTuple):
    """What becomes of a spectrogram.

    Attributes:
        cls: (class tokens, width).
        patches: (patches, width), along the frequency first.
    """

    cls: Array
    patches: Array


class Encoder(eqx.Module):
    """Encodes one spectrogram; `jax.vmap` it for several."""

    patch: eqx.nn.Linear
    places: eqx.nn.Embedding | None
    class_tokens: eqx.nn.Embedding | None
    registers: eqx.nn.Embedding | None
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    settings: EncoderSettings = eqx.field(static=True)

    def __init__(self, settings: EncoderSettings, key: Array) -> None:
        patch, places, tokens, registers, *blocks = jax.random.split(key, 4 + settings.depth)
        width = settings.width
        self.settings = settings
        self.patch = linear(settings.patch[0] * settings.patch[1], width, patch)
        rows = settings.grid[0] * settings.grid[1]
        self.places = table(rows, width, places) if settings.positions == "learned" else None
        self.class_tokens = table(settings.class_tokens, width, tokens) if settings.class_tokens else None
        self.registers = table(settings.registers, width, registers) if settings.registers else None
        self.blocks = [
            Block(
                width, settings.heads, settings.expansion, gated=settings.mlp == "swiglu", qk_norm=settings.qk_norm,
                scale=settings.layer_scale, key=one,
            )
            for one in blocks
        ]  # fmt: skip
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, spectrogram: Array, visible: Array | None = None) -> Encoded:
        """Encode a spectrogram (frames, mels), normalised, in whole patches, or its `visible` patches (n,) alone."""
        settings = self.settings
        grid = (len(spectrogram) // settings.patch[0], settings.grid[1])
        before = settings.class_tokens + settings.registers
        x = jax.vmap(self.patch)(patches_of(spectrogram, settings.patch))
        if self.places is not None:  # the first frames of the table, for a clip that is shorter
            x = x + self.places.weight[: len(x)]
        turns = None
        if settings.positions == "rope":
            size = settings.width // settings.heads
            turns = Turns(*grid_turns(grid, size, settings.rope_base, before))
        if visible is not None:
            x = x[visible]
            turns = turns and Turns(*(jnp.concatenate([part[:before], part[before:][visible]]) for part in turns))
        first = [part.weight for part in (self.class_tokens, self.registers) if part is not None]
        x = run_blocks(self.blocks, jnp.concatenate([*first, x]), turns)
        x = jax.vmap(self.norm)(x)
        return Encoded(x[: settings.class_tokens], x[before:])

    def embedding(self, spectrogram: Array) -> Array:
        """The embedding of a spectrogram, (width,)."""
        return pooled(self(spectrogram))


def pooled(encoded: Encoded) -> Array:
    """The mean of the class tokens, (width,), or of the patches where there are none."""
    return (encoded.cls if len(encoded.cls) else encoded.patches).mean(axis=0)


def patches_of(spectrogram: Array, patch: tuple[int, int]) -> Array:
    """Patches of a spectrogram (frames, mels), (patches, numbers of a patch), along the frequency first."""
    frames, mels = spectrogram.shape
    cut = spectrogram.reshape(frames // patch[0], patch[0], mels // patch[1], patch[1])
    return cut.swapaxes(1, 2).reshape(-1, patch[0] * patch[1])
