"""What a layout may ask of the JAX engine."""

from __future__ import annotations

from typing import Any

_TORCH_ONLY = {
    "compile": "XLA compiles every program",
    "sync_batch_norm": "a JAX model is a pure function, and has no running statistics",
    "find_unused_parameters": "a parameter that a step does not use has a gradient of zeros",
    "bucket_mb": "gradients are reduced by XLA",
    "max_memory_gb": "memory is not measured yet",
}


def check_jax_layout(layout: Any) -> None:
    """Refuse what the JAX engine has not.

    Args:
        layout: a `Layout` with `engine=jax`.

    Raises:
        ValueError: naming the key.
    """
    for name, why in _TORCH_ONLY.items():
        if getattr(layout, name):
            raise ValueError(f"layout.{name} belongs to layout.engine=torch ({why}); leave it out")
    if layout.strategy == "dp":
        raise ValueError("layout.strategy=dp belongs to layout.engine=torch; use layout.devices=N and strategy=ddp")
    if layout.reduction == "ordered":
        raise ValueError(
            "layout.reduction=ordered belongs to layout.engine=torch: XLA orders the sums inside of a program; use fast"
        )
    if layout.micro_batch == "auto":
        raise ValueError("layout.micro_batch=auto measures torch's memory; give a number, or null for one pass")
    if layout.strategy == "single" and layout.devices not in (1, "auto"):
        raise ValueError(
            f"layout.strategy=single is one device, but layout.devices={layout.devices}; use ddp, fsdp or hsdp"
        )
