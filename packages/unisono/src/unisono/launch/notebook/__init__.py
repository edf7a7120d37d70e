"""Runs from a notebook: classes of its cells as files, and what an interrupt of its kernel does."""
