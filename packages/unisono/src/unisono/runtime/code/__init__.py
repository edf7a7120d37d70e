"""Whose code a file is, what is plugged in, and errors of the user's and of libraries."""
