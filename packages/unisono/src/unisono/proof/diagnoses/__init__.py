"""From a pattern of differences to the likely fault, and what to do about it."""
