"""The processes of a run on one host: how they start, what they do when they end, and which fault is shown."""
