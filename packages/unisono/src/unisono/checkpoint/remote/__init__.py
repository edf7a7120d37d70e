"""Checkpoints in object stores: uploaded during training, restored at a start."""
