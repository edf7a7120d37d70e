"""Configuration: schema, composition, preflight checks, fingerprint. Imports neither torch nor JAX."""

CONFIG_FILE = "config.yaml"  # of a run, which makes a folder the directory of one
