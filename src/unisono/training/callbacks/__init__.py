"""What happens around the steps of a run, a behaviour a module."""
