"""What refuses a run, and says why."""
