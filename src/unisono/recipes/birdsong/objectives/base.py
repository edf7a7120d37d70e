"""What all objectives have: a module that looks at a micro-batch by the encoder, and tells numbers of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from jax import Array

from unisono.recipes.birdsong.model.encoder import Encoder


class Seen(NamedTuple):
    """What an objective found in a micro-batch.

    Attributes:
        rows: by name, numbers of each row: (rows, …). A row of a *sample* stays its own row: views of it are a second
            axis.
        embeddings: (rows, looks, width), input of the probe: several looks per sample.
    """

    rows: dict[str, Array]
    embeddings: Array


class Objective(Protocol):
    """A part of the model, trained together with the encoder."""

    def __call__(self, encoder: Encoder, batch: Mapping[str, Any]) -> Seen:
        """Look at a micro-batch.

        Args:
            encoder: of one spectrogram.
            batch: arrays whose first axis is the row.
        """
