"""The training loop and what acts on it."""
