"""The order of samples, and how they become micro-batches."""
