"""What crosses devices and processes."""
