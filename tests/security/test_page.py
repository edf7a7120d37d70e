"""The page about security names tests; each is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`([\w/-]*test_\w+\.py)`", (ROOT / "docs" / "security.md").read_text(encoding="utf-8")))
    assert len(named) > 20
    files = [
        path.relative_to(ROOT).as_posix()
        for top in ("packages", "recipes", "tests")
        for path in (ROOT / top).rglob("test_*.py")
    ]
    lost = [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]
    assert lost == []
