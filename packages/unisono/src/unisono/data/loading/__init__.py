"""Loads micro-batches in the planned order: read, built and prefetched by threads or processes."""
