"""The losses as sums over rows: of pairs of samples, of counts, of targets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono import moments, pairwise_distances
from unisono_microbiome.settings import TargetSettings

_SCALE = 10.0  # of distances of embeddings; hard clipping or a learnt scale collapse to a constant


def embedding_distances(rows: Tensor, others: Tensor) -> Tensor:  # (m, features), (n, features) -> (m, n)
    """Predicted distances: tanh(‖a − b‖ / 10), with gradients, in memory of m·n; a sample's own is for the caller."""
    return torch.tanh(pairwise_distances(rows, others) / _SCALE)


def distances_among(rows: Tensor) -> Tensor:  # (n, features) -> (n, n)
    """The same among some rows, 0 of a row to itself, in operations that ONNX has, too: without `cdist`."""
    apart = (rows[:, None] - rows[None]).square().sum(-1).sqrt()
    return torch.tanh(apart / _SCALE)


def pair_loss(
    rows: Tensor, all_rows: Tensor, truth: Tensor, first: int, scale: float = 1.0
) -> tuple[Tensor, dict[str, Any]]:
    """Σ over rows of the mean over all others of the squared error of the distance, and metrics of the pairs.

    Args:
        rows: embeddings of some rows, (m, features).
        all_rows: of the global batch, (n, features), these among them.
        truth: true distances over `scale`, (m, n).
        first: place of the first of these rows among all.
        scale: of the distances in the metrics.

    Returns:
        The sum, and the moments of the pairs' distances, a row counting as the mean over its pairs. With no other row
        all are 0.
    """
    predicted = embedding_distances(rows, all_rows)
    truth = truth.to(predicted.dtype)
    own = torch.arange(len(rows), device=rows.device)
    others = torch.ones_like(predicted).index_put_((own, own + first), predicted.new_zeros(()))
    share = others / max(1, len(all_rows) - 1)
    total = ((predicted - truth).square() * share).sum()
    return total, moments("distance", scale * predicted.detach(), scale * truth, share, count=len(rows))


def count_loss(shares: Tensor, counts: Tensor) -> Tensor:  # (rows, taxa), (rows, taxa) -> (rows,)
    """Each row's summed squared error of its taxa's counts over the largest of them; 0 is no taxon."""
    largest = counts.max(1, keepdim=True).values.clamp(min=1)
    return ((shares - counts / largest).square() * (counts > 0)).sum(1)


def target_loss(made: Tensor, truth: Tensor, config: TargetSettings) -> Tensor:  # (rows, outputs), (rows,) -> scalar
    """Summed over the rows that have a target: transformed ones, NaN for none, or classes, -1 for none.

    `made` is what the head gives: a number, one per quantile, or a logit per class.
    """
    wide = made.to(torch.promote_types(made.dtype, torch.float32))
    if not truth.is_floating_point():
        return F.cross_entropy(wide, truth, ignore_index=-1, reduction="sum")
    known = ~truth.isnan()
    truth = truth.nan_to_num().to(wide.dtype)
    if config.loss == "quantile":
        levels = torch.tensor(config.quantiles, dtype=wide.dtype, device=wide.device)
        error = truth[:, None] - wide
        each = torch.maximum(levels * error, (levels - 1) * error).mean(1)
    elif config.loss == "huber":
        each = F.huber_loss(wide[:, 0], truth, reduction="none", delta=config.huber)
    else:
        error = wide[:, 0] - truth
        each = error.abs() if config.loss == "mae" else error.square()
        if config.loss == "asymmetric":  # twice, so that a half is the squared error
            low = (error < 0).to(error.dtype)
            each = 2 * each * (low * config.asymmetry + (1 - low) * (1 - config.asymmetry))
    return (each * known).sum()


def known_moments(name: str, predicted: Tensor, truth: Tensor) -> dict[str, tuple[Any, Any]]:
    """Metrics over the rows that have a true value."""
    known = ~truth.isnan()
    return moments(name, predicted * known, truth.nan_to_num().to(predicted.dtype), known)
