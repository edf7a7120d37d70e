"""Tests of the JAX engine, which are skipped where JAX is not installed."""

import pytest

for name in ("jax", "optax", "equinox"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'unisono[jax]'")
