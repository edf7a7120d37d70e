"""The recursive models, one class for torch and one for JAX, and what they share."""
