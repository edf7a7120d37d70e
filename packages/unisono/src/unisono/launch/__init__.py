"""From a command to processes, and back to one exit code."""
