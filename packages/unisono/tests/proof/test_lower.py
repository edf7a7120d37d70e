"""Finding what a model computes in a lower precision inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.engines.torch.numerics.precision import double_by_default
from unisono.proof.recording.lower_precision import LowerPrecision


class Lowered(nn.Module):
    """Goes through NumPy and float32, which no request for a dtype shows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(x.detach().numpy().astype("float32")).sigmoid()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Lowered(), nn.Linear(4, 1)).double()


@contextmanager
def observed(*arguments: Any, perturbing: bool) -> Iterator[LowerPrecision]:
    """What is found in the passes of a step."""
    found = LowerPrecision(*arguments, perturbing=perturbing)
    assert found.part("forward") is None
    passes = found.part("passes")
    assert passes is not None
    with passes:
        yield found


def test_the_module_is_named() -> None:
    net = model()
    with observed(net, "fp64", 0, perturbing=False) as found:
        net(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert found.found == {"1": "float32"}


def test_in_fp32_there_is_nothing_lower_about_float32() -> None:
    net = nn.Linear(3, 1)
    with observed(net, "fp32", 0, perturbing=False) as found:
        net(torch.ones(2, 3))
        assert found.found == {}
        net(torch.ones(2, 3)).half()
    assert found.found == {"outside of the model": "float16"}


def test_only_what_is_lower_is_changed_and_only_in_its_last_bit() -> None:
    net, x = model(), torch.ones(2, 3, dtype=torch.float64)
    plain = net(x)
    with observed(net, "fp64", 0, perturbing=True):
        changed = net(x)
    size = float((changed - plain).detach().norm() / plain.detach().norm())
    assert 1e-9 < size < 1e-6
    net[1] = nn.Identity()
    with observed(net, "fp64", 0, perturbing=True):
        assert torch.equal(net(x), net(x))


def test_attention_by_a_fused_kernel_is_seen() -> None:
    q = torch.randn(1, 2, 4, 8)
    for backend, expected in (
        (torch.nn.attention.SDPBackend.FLASH_ATTENTION, True),
        (torch.nn.attention.SDPBackend.MATH, False),
    ):
        with torch.nn.attention.sdpa_kernel(backend), observed(nn.Identity(), "fp64", 0, perturbing=False) as found:
            F.scaled_dot_product_attention(q, q, q)
        assert found.attention == expected


def test_a_library_that_sets_a_default_dtype_does_not_leave_float64() -> None:
    before = torch.get_default_dtype()
    with double_by_default():
        torch.set_default_dtype(torch.float32)
        assert nn.Linear(1, 1).weight.dtype == torch.float64
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == before
    torch.set_default_dtype(before)
