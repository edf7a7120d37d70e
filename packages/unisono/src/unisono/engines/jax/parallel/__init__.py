"""Communication between devices and processes."""
