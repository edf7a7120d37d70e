"""Guards that refuse a faulty step and say why."""
