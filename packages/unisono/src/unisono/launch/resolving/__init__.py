"""From a typed configuration to one resolved run: layout, checks, folder, and where it resumes."""
