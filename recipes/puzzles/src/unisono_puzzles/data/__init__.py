"""Puzzles as arrays: read, checked, generated and augmented. NumPy only."""
