"""What is shown and written while training."""
