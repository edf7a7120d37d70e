"""The lowest layer: process identity, communication between processes, randomness, files and errors."""
