"""Recordings and what is made of them before the model sees it."""
