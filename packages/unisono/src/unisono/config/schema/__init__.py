"""Every setting of a run, its type and its default: one file a group."""
