"""Losses that need more than autograd gives: exact, in the memory of a part of their matrix."""
