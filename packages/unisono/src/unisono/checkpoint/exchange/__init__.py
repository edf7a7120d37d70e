"""Export of weights to other libraries, and import from them."""
