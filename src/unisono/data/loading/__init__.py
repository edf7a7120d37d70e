"""From the order to micro-batches: read, built and prefetched by threads or processes."""
