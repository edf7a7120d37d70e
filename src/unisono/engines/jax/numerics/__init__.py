"""What decides numbers: precision, updates, what is reported."""
