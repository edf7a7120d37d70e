"""Configuration: schema, composition, preflight checks, fingerprint. Imports neither torch nor JAX."""
