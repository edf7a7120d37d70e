"""Weights for other libraries and from them."""
