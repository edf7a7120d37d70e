"""The `unisono` command: one file per family of verbs."""
