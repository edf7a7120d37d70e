"""A checkpoint on disk: committed whole or absent, verified, kept or removed, resumed from."""
