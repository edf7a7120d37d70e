"""The encoder of spectrograms."""
