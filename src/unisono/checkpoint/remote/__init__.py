"""Checkpoints in object stores: uploaded beside training, restored at a start."""
