"""Numerics of the JAX engine: precision, optimizers."""
