"""The losses against their definitions, computed in the plainest way."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono_microbiome import losses
from unisono_microbiome.settings import TargetSettings


def naive(everyone: Tensor) -> Tensor:
    """tanh(√max(‖a − b‖², 1e-8) / 10) by a tensor of all differences, with a diagonal of 0."""
    squares = (everyone[:, None] - everyone[None]).square().sum(-1)
    return torch.tanh(squares.clamp(min=1e-8).sqrt() / 10) * (1 - torch.eye(len(everyone), dtype=everyone.dtype))


def embeddings(rows: int = 7, features: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = 3 * torch.randn(rows, features, dtype=torch.float64, generator=generator) + 20
    made[4] = made[1]  # the same sample twice
    truth = torch.rand(rows, rows, dtype=torch.float64, generator=generator)
    return made.requires_grad_(), (truth + truth.T) / 2 * (1 - torch.eye(rows, dtype=torch.float64))


@pytest.mark.parametrize("sizes", [[7], [3, 4], [1] * 7, [5, 1, 1]])
def test_pairs_are_those_of_the_whole_matrix_whoever_has_which_rows(sizes: list[int]) -> None:
    whole, truth = embeddings()
    upper = torch.triu(torch.ones_like(truth), 1).bool()
    expected = (naive(whole) - truth)[upper].square().mean()
    (expected * len(whole)).backward()
    assert whole.grad is not None
    reference, whole.grad = whole.grad, None
    assert float(reference.norm()) > 1e-3
    total = torch.zeros((), dtype=torch.float64)
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        made, _ = losses.pair_loss(whole[rows], whole, truth[rows], first)
        total, first = total + made, first + size
    total.backward()
    assert total.item() / len(whole) == pytest.approx(expected.item(), rel=1e-14)
    assert float((whole.grad - reference).norm()) <= 1e-13 * float(reference.norm())


def test_moments_are_those_of_all_pairs() -> None:
    whole, truth = embeddings()
    made = naive(whole).detach()
    off = ~torch.eye(7, dtype=torch.bool)
    _, named = losses.pair_loss(whole, whole, truth, 0)
    x, y = made[off], truth[off]
    expected = {
        "predicted": x, "true": y, "predicted²": x * x, "true²": y * y, "product": x * y, "error": (x - y).abs()
    }  # fmt: skip
    assert {name: float(value) / count for name, (value, count) in named.items()} == pytest.approx(
        {f"distance/{name}": float(value.mean()) for name, value in expected.items()}, rel=1e-12
    )
    assert not any(value.requires_grad for value, _ in named.values())


def test_a_row_alone_has_no_pairs() -> None:
    whole, truth = embeddings()
    total, named = losses.pair_loss(whole[:1], whole[:1], truth[:1, :1], 0)
    assert (total.item(), {float(value) for value, _ in named.values()}) == (0.0, {0.0})
    total.backward()
    assert whole.grad is not None
    assert not whole.grad.any()


def test_gradients_of_distances_are_the_derivatives() -> None:
    whole = embeddings()[0][:4]
    assert torch.autograd.gradcheck(
        losses.embedding_distances, (whole[:2].detach().requires_grad_(), whole[2:].detach())
    )
    assert torch.autograd.gradcheck(
        losses.embedding_distances, (whole[:2].detach(), whole[2:].detach().requires_grad_())
    )


def test_no_tensor_of_all_differences_is_made() -> None:
    rows, features = 64, 48
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for value in made if isinstance(made, tuple) else (made,):
                largest = max(largest, value.numel() if isinstance(value, Tensor) else 0)
            return made

    whole = torch.randn(rows, features, requires_grad=True)
    with Watch():
        losses.pair_loss(whole, whole, torch.zeros(rows, rows), 0)[0].backward()
    assert rows * rows <= largest < 2 * rows * rows


def test_half_precision_comes_wide() -> None:
    half = embeddings()[0].detach().to(torch.bfloat16)
    assert losses.embedding_distances(half, half).dtype == torch.float32


def test_counts_are_shares_of_the_largest() -> None:
    shares = torch.tensor([[0.5, 0.25, 0.9], [0.1, 0.2, 0.3]])
    made = losses.count_loss(shares, torch.tensor([[10.0, 5.0, 0.0], [0.0, 0.0, 0.0]]))
    assert made.tolist() == pytest.approx([0.25 + 0.0625, 0.0])


@pytest.mark.parametrize("kind", ["mse", "mae", "huber", "quantile", "asymmetric"])
def test_regressions_count_what_is_known(kind: str) -> None:
    config = TargetSettings(loss=kind, huber=0.5, asymmetry=0.8, quantiles=[0.2, 0.5])
    made = np.array([[0.3, 0.1], [1.0, 2.0], [-2.0, 0.4]])
    truth = np.array([0.5, np.nan, 1.0])
    error = truth - made[:, 0]
    each = {
        "mse": error**2,
        "mae": abs(error),
        "asymmetric": 2 * 0.8 * error**2,  # all predictions are too low
        "huber": np.where(abs(error) < 0.5, error**2 / 2, 0.5 * (abs(error) - 0.25)),
        "quantile": np.mean(
            [
                [q * e if e > 0 else (q - 1) * e for q, e in zip((0.2, 0.5), row, strict=True)]
                for row in truth[:, None] - made
            ],
            1,
        ),
    }[kind]
    given = torch.from_numpy(made if kind == "quantile" else made[:, :1]).requires_grad_()
    total = losses.target_loss(given, torch.from_numpy(truth), config)
    assert total.item() == pytest.approx(np.nansum(each), rel=1e-12)
    total.backward()
    assert given.grad is not None
    assert given.grad[0].any()
    assert not given.grad[1].any()


def test_predictions_that_are_too_low_weigh_more_than_those_too_high() -> None:
    config = TargetSettings(loss="asymmetric", asymmetry=0.9)
    low, high = (losses.target_loss(torch.tensor([[made]]), torch.tensor([2.0]), config) for made in (1.0, 3.0))
    assert (low.item(), high.item()) == pytest.approx((1.8, 0.2))
    even = losses.target_loss(torch.tensor([[1.0]]), torch.tensor([2.0]), TargetSettings(loss="asymmetric"))
    assert even.item() == 1.0


def test_classes_count_what_is_known() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [5.0, 5.0, 5.0], [0.0, 0.0, 1.0]])
    total = losses.target_loss(logits, torch.tensor([0, -1, 1]), TargetSettings())
    expected = -logits.log_softmax(-1)[[0, 2], [0, 1]].sum()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
