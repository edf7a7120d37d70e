"""What `unisono doctor` finds out about this host: facts, rules about them, and measured rates."""
