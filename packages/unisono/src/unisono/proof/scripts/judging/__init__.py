"""What the runs of a script show: each by itself, and held against that on one process."""
