"""Data sources, the order of samples, and their loading into micro-batches."""
