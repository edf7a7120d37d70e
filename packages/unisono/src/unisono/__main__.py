"""`python -m unisono` is the `unisono` command."""

from unisono.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
