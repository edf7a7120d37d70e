"""What the numbers of a step depend on: precision, randomness, buffers, sums over rows and processes."""
