"""Tables in pages: each benchmark that writes one has its place, and touches nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import page


def test_every_benchmark_that_writes_a_table_has_its_place() -> None:
    written = {}
    for script in (page.ROOT / "benchmarks").glob("*.py"):
        for name, rest in re.findall(r'page\.put\("(\w+)", (.*)\)\n', script.read_text(encoding="utf-8")):
            where = re.search(r'"([^"]+\.md)"', rest)
            written[script.stem] = (name, where.group(1) if where else "docs/benchmarks.md")
    assert len(written) == 15
    for script, (name, where) in written.items():
        assert name == script
        assert page.read_part(name, where).strip(), name


def test_what_is_put_replaces_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "ROOT", tmp_path)
    begin, end = page.marks("a")
    (tmp_path / "p.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    page.put("a", "\nnew\n", "p.md")
    assert (tmp_path / "p.md").read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert page.read_part("a", "p.md") == "\nnew\n"
    with pytest.raises(SystemExit, match=r"p\.md has no place for it: write <!-- b: written by"):
        page.put("b", "new", "p.md")
    assert "b:" not in (tmp_path / "p.md").read_text()
