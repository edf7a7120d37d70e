"""The processes of a run on one host: how they start, how they end, and which fault is reported."""
