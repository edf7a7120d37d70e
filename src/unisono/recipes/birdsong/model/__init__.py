"""The encoder of spectrograms, and the heads on it."""
