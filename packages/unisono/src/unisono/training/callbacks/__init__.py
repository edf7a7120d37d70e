"""What users add to the loop of a run: their callbacks, and ours that are written like theirs."""
