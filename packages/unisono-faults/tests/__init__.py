"""The fault matrix, run with real processes."""
