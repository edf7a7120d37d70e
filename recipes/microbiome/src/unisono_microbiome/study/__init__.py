"""A study as data: its table, and what is known of its samples and taxa, aligned to each other."""
