"""Readers of the formats of files."""
