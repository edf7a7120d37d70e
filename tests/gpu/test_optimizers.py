"""Every optimizer in every implementation and precision computes what its plain loop does in float64."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu

KINDS = ("adamw", "sgd", "lion", "adam_atan2", "adafactor", "muon")
IMPLEMENTATIONS = ("auto", "fused", "foreach", "loop")
# Of a weight, relative to the largest, after three updates.
FLOORS = {"fp64": 1e-12, "fp32": 2e-5, "bf16": 2e-5}  # bf16 keeps fp32 weights, gradients and moments


def update(kind: str, implementation: str, precision: str, device: str) -> tuple[Any, dict[str, Any]]:
    """Weights after three updates by keyed gradients, (n,) float64, and the dtypes of step counts."""
    import torch
    from pydantic import TypeAdapter
    from torch import nn

    from unisono.config.schema.run import RunConfig
    from unisono.engines.torch.numerics import precision as precisions
    from unisono.optim.optimizers import build_optimizer

    settings = TypeAdapter(RunConfig.model_fields["optim"].rebuild_annotation()).validate_python(
        {"kind": kind, "lr": 0.01, "weight_decay": 0.1, "implementation": implementation}
    )
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24)), nn.Linear(24, 16))
    dtype = precisions.MASTER[precision]
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(device, dtype)
    with precisions.promotion(precision):
        optimizer = build_optimizer(settings, model, [model[1]])
        for _ in range(3):
            for parameter in model.parameters():
                gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad = gradient.to(device, dtype)
            optimizer.step()
    weights = torch.cat([parameter.detach().double().cpu().flatten() for parameter in model.parameters()])
    steps = {str(name): value.dtype for state in optimizer.state.values() for name, value in state.items()
             if isinstance(value, torch.Tensor) and name == "step"}  # fmt: skip
    return weights, steps


@pytest.mark.parametrize("precision", FLOORS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_updates_as_its_loop_does_in_every_implementation_and_precision(
    kind: str, implementation: str, precision: str, device: str
) -> None:
    import torch

    from unisono import ConfigError

    try:
        weights, steps = update(kind, implementation, precision, device)
    except ConfigError as error:
        pytest.skip(f"{kind} has no {implementation} implementation: {error}")
    expected, _ = update(kind, "loop", "fp64", "cpu")
    assert torch.isfinite(weights).all()
    assert float((weights - expected).abs().max() / expected.abs().max()) < FLOORS[precision]
    if kind == "adamw":  # whose fused CUDA kernel reads the bytes of a step count as float32
        assert set(steps.values()) == {torch.float32}
