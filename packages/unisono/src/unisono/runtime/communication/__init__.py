"""Who a process is, and what processes say to each other without a framework."""
