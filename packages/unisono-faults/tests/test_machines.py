"""Hosts, records, security."""

from __future__ import annotations

import pytest

from .promises import test_promises_are_kept  # noqa: F401

pytestmark = pytest.mark.slow
GROUP = "FGS"
