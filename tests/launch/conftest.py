"""What tests of launchers share, beside the core or here."""

from packages.unisono.tests.launch.conftest import here, host

__all__ = ["here", "host"]
