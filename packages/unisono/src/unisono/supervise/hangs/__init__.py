"""Whether processes hang, where, and because of whom."""
