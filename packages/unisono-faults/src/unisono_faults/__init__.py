"""The fault matrix: what happens to a run under each fault that real runs have met. See docs/faults.md."""
