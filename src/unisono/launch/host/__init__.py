"""What a host must have for a run, and what of its environment is known to be wrong."""
