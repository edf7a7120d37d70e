"""A run's folder, opened to use what was trained."""
