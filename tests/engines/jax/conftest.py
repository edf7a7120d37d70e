"""Tests of the JAX engine need JAX, which torch users do not install."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if all(map(find_spec, ("jax", "optax", "equinox"))) else ["test_*.py"]
