"""LeJEPA: views of one clip agree, and the embeddings of all clips are spread like a standard normal.

After Balestriero & LeCun, "LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics" (2025,
arXiv 2511.08544). The second term, SIGReg, is a statistic of the whole global batch: its mean over parts of the batch
is another number, so it is computed once on everyone's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.model.layers import linear
from unisono_birdsong.objectives import Seen
from unisono_birdsong.settings import LeJepa


class Projector(eqx.Module):
    """Embeddings to the space in which they are compared: two hidden layers, each normalised and rectified."""

    layers: tuple[eqx.nn.Linear, eqx.nn.Linear, eqx.nn.Linear]
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, width: int, settings: LeJepa, key: Array) -> None:
        one, two, three = jax.random.split(key, 3)
        hidden = settings.hidden
        self.layers = (
            eqx.nn.Linear(width, hidden, key=one),
            linear(hidden, hidden, two),
            linear(hidden, settings.width, three),
        )
        self.norms = eqx.nn.LayerNorm(hidden), eqx.nn.LayerNorm(hidden)

    def __call__(self, x: Array) -> Array:
        """(width,) to (projected width,)."""
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = jax.nn.relu(norm(layer(x)))
        return self.layers[-1](x)


class Lejepa(eqx.Module):
    """Projections of every view of every clip."""

    projector: Projector

    def __init__(self, width: int, settings: LeJepa, key: Array) -> None:
        self.projector = Projector(width, settings, key)

    def __call__(self, encoder: Encoder, batch: Mapping[str, Any]) -> Seen:
        """Look at views (rows, views, frames, mels); gives `projected` (rows, views, projected width).

        Rows and views stay two axes throughout, so that no reshape can mix them.
        """
        embeddings = jax.vmap(jax.vmap(encoder.embedding))(batch["views"])
        return Seen({"projected": jax.vmap(jax.vmap(self.projector))(embeddings)}, embeddings)


def invariance(projected: Array) -> Array:
    """How far the views of each sample (rows, views, width) lie from their mean, (rows,): mean squares."""
    return jnp.square(projected - projected.mean(axis=1, keepdims=True)).mean(axis=(1, 2))


def sigreg(projected: Array, key: Array, settings: LeJepa) -> Array:
    """Sketched isotropic Gaussian regularisation, a number for all rows together.

    For each drawn direction it is the Epps–Pulley distance of the empirical characteristic function to that of a
    standard normal, ∫ |φ̂(t) − e^(−t²/2)|² e^(−t²/2) dt over ±reach by the trapezoid rule, times the rows; the mean
    over directions and views.

    Args:
        projected: (rows, views, width), of the whole global batch.
        key: of the directions, the same for all of the batch.
        settings: directions, knots and reach.
    """
    rows, _, width = projected.shape
    directions = jax.random.normal(key, (width, settings.directions), projected.dtype)
    directions = directions / jnp.linalg.norm(directions, axis=0)
    knots = np.linspace(0.0, settings.reach, settings.knots)
    normal = np.exp(-np.square(knots) / 2)
    steps = np.full(len(knots), 2 * knots[1])  # both halves of an even integrand
    steps[[0, -1]] = knots[1]
    t, target, weights = (jnp.asarray(each, projected.dtype) for each in (knots, normal, steps * normal))
    angles = (projected @ directions)[..., None] * t  # (rows, views, directions, knots)
    off = jnp.square(jnp.cos(angles).mean(axis=0) - target) + jnp.square(jnp.sin(angles).mean(axis=0))
    return rows * (off @ weights).mean()
