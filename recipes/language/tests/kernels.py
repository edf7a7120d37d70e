"""Gradients of a small language model in a precision, as the engine computes them, and how far rounding moves them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from unisono.engines.torch.numerics import precision as precisions
from unisono.proof.cases import EPSILON
from unisono.task import Context
from unisono_language.task import Language

Gradients = dict[str, np.ndarray]


def gradients(language: Language, precision: str, change: Any = None, device: str = "cpu", rows: int = 6) -> Gradients:
    """Of the summed loss of a few rows, with the kernels that the task chooses for device and precision."""
    language.kernels(device, precision)
    torch.manual_seed(0)
    model = language.build().train()
    precisions.to_master(model, precision)
    if change is not None:
        change(model, precision)
    model.to(device)
    made = language.collate([language.data()[row] for row in range(rows)])
    batch = {name: torch.from_numpy(array).to(device) for name, array in made.items()}
    with precisions.promotion(precision):
        with precisions.autocast(precision, torch.device(device)):
            outputs = language.outputs(model, batch, Context(0, training=True))
            totals = language.totals(outputs, batch, Context(0, training=True)) if language.needs_totals else {}
            loss = language.loss(outputs, batch, Context(0, training=True, totals=totals))
        sum(loss.weights.get(name, 1.0) * term for name, term in loss.sums.items()).backward()  # type: ignore[union-attr]
    return {n: p.grad.cpu().numpy().copy() for n, p in model.named_parameters() if p.grad is not None}


def perturbed(model: torch.nn.Module, precision: str) -> None:
    """Change every weight by up to its last bit."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.mul_((1 + EPSILON[precision] * change).to(parameter.dtype))


def distance(mine: Gradients, reference: Gradients) -> float:
    """Of the whole gradients, relative."""
    assert mine.keys() == reference.keys()
    square = sum(float(np.square(np.float64(mine[name]) - np.float64(b)).sum()) for name, b in reference.items())
    return float(np.sqrt(square / sum(float(np.square(np.float64(b)).sum()) for b in reference.values())))
