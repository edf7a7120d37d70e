"""A run's model without its memory: what is checked of it before a start, and what is described of it."""
