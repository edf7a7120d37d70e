"""The layout of a model over processes and devices, and the communication between them."""
