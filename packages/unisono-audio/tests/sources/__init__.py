"""Tests of recordings as rows of a task, which are skipped where the core is not installed."""

import pytest

pytest.importorskip("unisono", reason="unisono is not installed: pip install 'unisono-audio[sources]'")
