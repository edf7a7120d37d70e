"""Elementwise optimizers against their formulas, written down once more in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from unisono.optim.adam_atan2 import AdamAtan2
from unisono.optim.lion import Lion, LionForeach

LR, DECAY, STEPS = 0.01, 0.1, 6


def drawn(seed: int, scale: float = 1.0) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """A first value and gradients, some of them zero."""
    rng = np.random.default_rng(seed)
    gradients = [scale * rng.normal(size=(3, 4)) for _ in range(STEPS)]
    gradients[2][0] = 0.0
    return rng.normal(size=(3, 4)), gradients


def trained(optimizer: Any, value: np.ndarray[Any, Any], gradients: list[np.ndarray[Any, Any]], **more: Any) -> Any:
    parameters = [nn.Parameter(torch.tensor(value)), nn.Parameter(torch.tensor(-value))]  # several, as in a model
    made = optimizer(parameters, lr=LR, weight_decay=DECAY, **more)
    for gradient in gradients:
        for parameter, sign in zip(parameters, (1.0, -1.0), strict=True):
            parameter.grad = torch.tensor(sign * gradient)
        made.step()
    ours, mirrored = (parameter.detach().numpy() for parameter in parameters)
    np.testing.assert_array_equal(ours, -mirrored)
    assert np.abs(ours - value).max() > LR  # it moved
    return ours


@pytest.mark.parametrize("foreach", [True, False])
def test_adam_atan2(foreach: bool) -> None:
    value, gradients = drawn(1)
    (beta1, beta2), a, b = (0.9, 0.95), 1.3, 0.7
    expected, first, second = value.copy(), np.zeros_like(value), np.zeros_like(value)
    for step, gradient in enumerate(gradients, start=1):
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        unbiased, root = first / (1 - beta1**step), np.sqrt(second / (1 - beta2**step))
        expected = expected * (1 - LR * DECAY) - LR * a * np.arctan2(unbiased, b * root)
    ours = trained(AdamAtan2, value, gradients, betas=(beta1, beta2), a=a, b=b, foreach=foreach)
    np.testing.assert_allclose(ours, expected, rtol=1e-13)


def test_adam_atan2_takes_the_same_step_for_gradients_of_any_size() -> None:
    value, gradients = drawn(2)
    small = trained(AdamAtan2, value, [1e-30 * gradient for gradient in gradients])
    np.testing.assert_allclose(small, trained(AdamAtan2, value, gradients), rtol=1e-12)


@pytest.mark.parametrize("kind", [Lion, LionForeach])
def test_lion(kind: Any) -> None:
    value, gradients = drawn(3)
    beta1, beta2 = 0.9, 0.99
    expected, average = value.copy(), np.zeros_like(value)
    for gradient in gradients:
        direction = np.sign(beta1 * average + (1 - beta1) * gradient)
        expected = expected * (1 - LR * DECAY) - LR * direction
        average = beta2 * average + (1 - beta2) * gradient
    np.testing.assert_allclose(trained(kind, value, gradients, betas=(beta1, beta2)), expected, rtol=1e-13)
