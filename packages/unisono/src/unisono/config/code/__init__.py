"""Which code a configuration names, whose it is, and whether it is what it was."""
