"""Kernels for experts on the device: they compute what the loop over experts computes in float64."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def experts_layer(dtype: Any, device: str) -> tuple[Any, tuple[Any, Any, Any]]:
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
    generator = torch.Generator().manual_seed(0)
    layer = Qwen3MoeExperts(config).double()
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    hidden = torch.randn(96, 64, generator=generator, dtype=torch.float64)
    shares, chosen = torch.randn(96, 8, generator=generator, dtype=torch.float64).softmax(-1).topk(2, dim=-1)
    layer = layer.to(device, dtype)
    return layer, (hidden.to(device, dtype).requires_grad_(), chosen.to(device), shares.to(device, dtype))


@pytest.mark.parametrize(("precision", "floor"), [("fp64", 1e-12), ("fp32", 1e-4), ("bf16", 0.05)])
def test_grouped_experts_compute_what_the_loop_over_experts_computes(device: str, precision: str, floor: float) -> None:
    import torch

    from unisono.engines.torch.numerics.precision import promotion
    from unisono_language import experts

    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]

    def gradients(dtype: Any, how: str, device: str) -> list[Any]:
        layer, inputs = experts_layer(dtype, device)
        layer.config._experts_implementation = how
        with promotion("fp64" if dtype == torch.float64 else "fp32"):
            made = layer(*inputs)
            made.double().sin().sum().backward()
        return [made.detach(), inputs[0].grad, *(parameter.grad for parameter in layer.parameters())]

    experts.register_grouped()
    grouped = gradients(dtype, experts.GROUPED, device)
    for one, exact in zip(grouped, gradients(torch.float64, "eager", "cpu"), strict=True):
        assert float((one.double().cpu() - exact).norm() / exact.norm()) < floor
