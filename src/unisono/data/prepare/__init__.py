"""Rows made ahead on disk: prepared in parallel, in partitions, and cut anew."""
