"""Packaged recipes: each a task, its YAML groups, and a page with measured results. They use only the public face."""
