"""The few faults that every test run injects."""

from __future__ import annotations

from .promises import test_promises_are_kept  # noqa: F401
