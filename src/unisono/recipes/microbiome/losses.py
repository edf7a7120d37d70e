"""The losses as sums over rows: of all pairs of samples, of counts, of targets and what is known of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.recipes.microbiome.modelling import Target

_SCALE = 10.0  # of distances of embeddings; hard clipping or a learnt scale collapse to a constant
_LEAST = 1e-4  # of distances of embeddings; below it there is no gradient, whose direction would be noise


def distances(rows: Tensor, others: Tensor) -> Tensor:  # (m, features), (n, features) -> (m, n)
    """Predicted distances: tanh(‖a − b‖ / 10), with gradients, in memory of m·n; a sample's own is for the caller."""
    wide = torch.promote_types(rows.dtype, torch.float32)  # bf16 is too coarse for differences
    found: Tensor = _Euclidean.apply(rows.to(wide), others.to(wide))  # type: ignore[no-untyped-call]
    return torch.tanh(found / _SCALE)


def pairs(rows: Tensor, everyone: Tensor, truth: Tensor, first: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ over rows of the mean over all others of the squared error of the distance, and moments of the pairs.

    Args:
        rows: embeddings of some rows, (m, features).
        everyone: of all rows of the global batch, (n, features), these among them.
        truth: true distances, (m, n).
        first: place of the first of these rows among all.

    Returns:
        The sum, and sums over the rows of means over their pairs: of predicted and true distances, of their squares and
        product, and of the absolute error. With no other row all are 0.
    """
    made = distances(rows, everyone)
    truth = truth.to(made.dtype)
    own = torch.arange(len(rows), device=rows.device)
    others = torch.ones_like(made).index_put_((own, own + first), made.new_zeros(()))
    share = others / max(1, len(everyone) - 1)
    error = made - truth
    total = (error.square() * share).sum()
    made = made.detach()
    named = {
        "predicted": made,
        "true": truth,
        "predicted²": made.square(),
        "true²": truth.square(),
        "product": made * truth,
        "error": error.detach().abs(),
    }
    return total, {name: (value * share).sum() for name, value in named.items()}


def counts(shares: Tensor, counts: Tensor) -> Tensor:  # (rows, taxa), (rows, taxa) -> (rows,)
    """Each row's summed squared error of its taxa's counts over the largest of them; 0 is no taxon."""
    largest = counts.max(1, keepdim=True).values.clamp(min=1)
    return ((shares - counts / largest).square() * (counts > 0)).sum(1)


def target(made: Tensor, truth: Tensor, config: Target) -> Tensor:  # (rows, outputs), (rows,) -> scalar
    """Summed over the rows that have a target.

    Args:
        made: what the head gives: a number, one per quantile, or a logit per class.
        truth: transformed targets, NaN for none; or classes, -1 for none.
        config: of the target.
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
        each = error.square() if config.loss == "mse" else error.abs()
    return (each * known).sum()


class _Euclidean(torch.autograd.Function):
    """‖a − b‖ for all pairs, at least 1e-4, in memory of m·n both ways.

    torch's own `cdist` has the forward pass; its backward pass takes m·n·features on accelerators, or, with the product
    of matrices, loses the digits of small distances. The gradient is a product of matrices without that loss.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:  # (m, features), (n, features) -> (m, n)
        found = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(a, b, found)
        return found.clamp(min=_LEAST)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b, found = ctx.saved_tensors
        # ∂‖a − b‖/∂a = (a − b)/‖a − b‖; with the middle of all at zero the two parts are of the size of distances.
        middle = b.mean(0)
        a, b = a - middle, b - middle
        pull = torch.where(found > _LEAST, gradients[0] / found, 0.0)
        return pull.sum(1)[:, None] * a - pull @ b, pull.sum(0)[:, None] * b - pull.T @ a
