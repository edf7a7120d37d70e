"""Euclidean distances of all pairs of rows, for losses across samples; both passes need only O(pairs) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MIN_DISTANCE = 1e-4  # no gradient below it, since its direction would be noise


def pairwise_distances(rows: Tensor, others: Tensor) -> Tensor:  # (m, features), (n, features) -> (m, n)
    """‖a − b‖ for all pairs, at least 1e-4, in fp32 or wider, since bf16 is too coarse for differences.

    The forward pass is torch's `cdist`, whose backward pass needs m·n·features memory on accelerators or, if computed
    by matrix products, is inaccurate for small distances. The backward pass here uses accurate matrix products.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    found: Tensor = _Euclidean.apply(rows.to(wide), others.to(wide))  # type: ignore[no-untyped-call]
    return found


class _Euclidean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        found = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(a, b, found)
        return found.clamp(min=_MIN_DISTANCE)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b, found = ctx.saved_tensors
        # ∂‖a − b‖/∂a = (a − b)/‖a − b‖; after centring, both terms are of the order of the distances.
        middle = b.mean(0)
        a, b = a - middle, b - middle
        pull = torch.where(found > _MIN_DISTANCE, gradients[0] / found, 0.0)
        return pull.sum(1)[:, None] * a - pull @ b, pull.sum(0)[:, None] * b - pull.T @ a
