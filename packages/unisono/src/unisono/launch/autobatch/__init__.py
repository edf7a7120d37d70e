"""Finds the largest micro-batch that fits the memory of a device, by measurement."""
