"""Losses of labels, a number of each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from unisono.recipes.birdsong.settings import Asymmetric


def cross_entropy(logits: Array, label: Array) -> Array:
    """Of one label, in nats, (rows,); 0 where it is negative, which is to say unknown.

    Args:
        logits: (rows, classes).
        label: (rows,) integers.
    """
    loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(label, 0)[:, None], axis=1)[:, 0]
    return jnp.where(label >= 0, loss, 0.0)


def asymmetric(logits: Array, labels: Array, settings: Asymmetric) -> Array:
    """The asymmetric loss of several labels (Ridnik et al., 2021, eq. 7), the sum over classes, (rows,).

    A positive costs (1 − p)^γ₊ · −log p, a negative p_m^γ₋ · −log(1 − p_m) with p_m = max(p − clip, 0).

    Args:
        logits: (rows, classes).
        labels: (rows, classes), above 0 where a class is there.
        settings: the two γ and the clip.
    """
    p = jax.nn.sigmoid(logits)
    positive = jnp.power(1 - p, settings.positive) * -jax.nn.log_sigmoid(logits)
    shifted = jnp.maximum(p - settings.clip, 0.0)
    # Where clip is 0, 1 − p loses all digits of a sure mistake, so its logarithm comes from the logit.
    costs = -jax.nn.log_sigmoid(-logits) if settings.clip == 0 else -jnp.log1p(-shifted)
    above = jnp.where(shifted > 0, shifted, 1.0)  # a power of 0 has no gradient where the exponent is below 1
    focus = jnp.where(shifted > 0, jnp.power(above, settings.negative), 0.0)
    return jnp.where(labels > 0, positive, focus * costs).sum(axis=1)
