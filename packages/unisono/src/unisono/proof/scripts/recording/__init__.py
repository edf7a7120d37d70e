"""What runs in each process of a script, and records what it does."""
