"""Losses with custom backward passes: exact, without materialising their full matrix."""
