"""Where the runs of a sweep run: one interface, found by entry points (`unisono.launchers`)."""
