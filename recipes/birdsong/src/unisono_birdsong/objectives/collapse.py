"""Whether embeddings still tell samples apart: their spread, and how many dimensions they use."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from unisono import Callback

SPREAD, RANK = "embedding_spread", "embedding_rank"
_log = logging.getLogger("unisono.birdsong")
_COLLAPSED = 0.01  # of the spread


def spread_and_rank(embeddings: Array) -> tuple[Array, Array]:
    """Two numbers of a batch of embeddings.

    The spread is the deviation from the mean embedding over the length of embeddings (root mean squares): 0 where all
    are the same. The rank is the participation ratio (tr C)² / tr C² of their covariance C: how many directions share
    the variance, 1 to the smaller of width and rows − 1; 0 where there is none.

    Args:
        embeddings: (rows, width).
    """
    centred = embeddings - embeddings.mean(axis=0)
    total, size = jnp.square(centred).sum(), jnp.square(embeddings).sum()
    rows, width = centred.shape
    gram = centred.T @ centred if width < rows else centred @ centred.T  # with the same eigenvalues above 0
    squares = jnp.square(gram).sum()
    spread = jnp.sqrt(total / jnp.where(size > 0, size, 1.0))
    return spread, jnp.where(squares > 0, jnp.square(total) / jnp.where(squares > 0, squares, 1.0), 0.0)


class CollapseWarning(Callback):
    """Warns after an evaluation whose embeddings are nearly the same for all recordings."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Look at the spread of held-out recordings."""
        spread = values.get(SPREAD)
        if spread is not None and not spread >= _COLLAPSED:
            _log.warning(
                "after step %d the embeddings of held-out recordings are nearly the same (%s %.2g, %s %.2g): the "
                "encoder collapses. Lower optim.lr, or raise task.lejepa.weight where task.objective=lejepa",
                step, SPREAD, spread, RANK, values.get(RANK, float("nan")),
            )  # fmt: skip
