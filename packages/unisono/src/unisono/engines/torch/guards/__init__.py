"""Guards that watch the steps of the torch engine and never change a number."""
