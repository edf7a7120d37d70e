"""Evaluation, exact at any world size."""
