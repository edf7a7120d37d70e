"""The rows of the fault matrix, one module a kind."""
