"""Watches over a run: its lock, hangs and failures, external requests, and the decisions that all ranks share."""
