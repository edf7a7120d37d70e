"""Sweeps, search, comparison and reports, with small tasks."""
