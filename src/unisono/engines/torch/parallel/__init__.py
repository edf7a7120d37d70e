"""How a model is laid out over processes and devices, and what its processes say to each other."""
