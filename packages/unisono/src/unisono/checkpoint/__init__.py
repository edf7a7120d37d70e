"""Checkpoints: whole or absent."""
