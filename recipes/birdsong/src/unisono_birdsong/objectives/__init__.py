"""What the encoder is trained for: each objective is a module that tells numbers of each row of a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array


class Seen(NamedTuple):
    """What an objective found in a micro-batch.

    Attributes:
        rows: by name, numbers of each row: (rows, …). A row of a *sample* stays its own row: views of it are a second
            axis.
        embeddings: (rows, looks, width), input of the probe: several looks per sample.
    """

    rows: dict[str, Array]
    embeddings: Array
