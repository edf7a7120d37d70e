"""Which micro-batch fits the memory of a device, by measurement."""
