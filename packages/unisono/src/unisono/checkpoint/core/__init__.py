"""Checkpoints on disk: committed atomically, verified, retained or removed, resumed from."""
