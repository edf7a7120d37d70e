"""What watches the steps of the torch engine and never changes a number."""
