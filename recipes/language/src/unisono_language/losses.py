"""Sums of the loss over rows: cross-entropy in chunks, its bits per byte, answers of pairs, and what guides routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import Batch, Loss
from unisono_language.data.chat import IGNORED

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def per_row(outputs: Mapping[str, Any]) -> str:
    """Which output has a row per row of the batch: hidden states, or logits of models that do more than multiply."""
    return next(name for name in ("hidden", "logits") if name in outputs)


def sum_cross_entropy(outputs: Mapping[str, Any], targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats over targets (tokens,), and the number of correct predictions.

    Args:
        outputs: of the task.
        targets: of all its rows, one after the other.
        chunk: tokens whose logits are in memory at a time.
    """
    from unisono import linear_cross_entropy, logits_cross_entropy

    if "logits" in outputs:
        return logits_cross_entropy(outputs["logits"], targets)
    hidden = outputs["hidden"].reshape(len(targets), -1)
    return linear_cross_entropy(hidden, outputs["weight"], outputs["bias"], targets, chunk)


def log_probabilities(outputs: Mapping[str, Any], batch: Batch, chunk: int) -> Tensor:
    """The log-probability of both answers of each pair, (pairs, 2)."""
    import torch

    name = per_row(outputs)
    targets = torch.as_tensor(batch["targets"], device=outputs[name].device)
    rows = zip(outputs[name], targets.reshape(-1, targets.shape[-1]), strict=True)
    sums = [sum_cross_entropy({**outputs, name: row[None]}, wanted, chunk)[0] for row, wanted in rows]
    return -torch.stack(sums).view(-1, 2)


def with_metrics(total: Tensor, right: Tensor, targets: Tensor, sizes: NDArray[np.float64] | None) -> Loss:
    """The loss of an evaluation, with the share of correct predictions and bits per byte.

    Args:
        total: cross-entropy in nats.
        right: number of correct predictions.
        targets: of all rows, (tokens,).
        sizes: bytes of each token of the vocabulary; None where these are unknown, so that there are no bits per byte.
    """
    import torch

    real = targets[targets != IGNORED]
    metrics: dict[str, tuple[Any, Any]] = {"accuracy": (right, real.numel())}
    if sizes is not None:
        known = torch.as_tensor(sizes, dtype=total.dtype, device=real.device)
        metrics["bits_per_byte"] = total / np.log(2), known[real].sum()
    return Loss({"next_token": total}, metrics=metrics)


def predictions(outputs: Mapping[str, Any], batch: Batch, chunk: int) -> dict[str, list[float]]:
    """Of each row the number of targets, the nats per target, and the share of correct predictions."""
    import torch

    columns: dict[str, list[float]] = {"targets": [], "nats_per_target": [], "accuracy": []}
    name = per_row(outputs)
    for row, targets in zip(outputs[name], torch.as_tensor(batch["targets"], device=outputs[name].device), strict=True):
        total, right = sum_cross_entropy({**outputs, name: row[None]}, targets, chunk)
        count = int((targets != IGNORED).sum())
        columns["targets"].append(count)
        columns["nats_per_target"].append(float(total) / max(1, count))
        columns["accuracy"].append(float(right) / max(1, count))
    return columns


def with_routers(
    total: Tensor, logits: Tensor, real: Tensor, counts: Tensor, weights: Mapping[str, float], per_token: int
) -> Loss:
    """The loss with the terms that guide routers, and a metric of the experts' imbalance.

    Args:
        total: cross-entropy of these rows.
        logits: of the routers, (rows, length, layers, experts).
        real: which tokens are not padding, (rows, length).
        counts: tokens routed to each expert, of each row or of the global batch, (rows or 1, layers, experts).
        weights: of the terms that there are.
        per_token: experts per token.
    """
    from unisono_language import experts

    sums = {"next_token": total}
    if "balance" in weights:
        sums["balance"] = experts.balance_loss(logits, real, counts, per_token)
    if "router_z" in weights:
        sums["router_z"] = experts.z_loss(logits, real)
    tokens = real.sum(1)
    load = (experts.expert_load(counts) * tokens).sum(), tokens.sum()
    return Loss(sums, dict(weights), metrics={"expert_load": load})
