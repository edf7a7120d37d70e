"""What several runs show together: one table, and pictures."""
