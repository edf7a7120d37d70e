"""Puts what a benchmark found into a page of the docs, between the benchmark's two marks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def marks(name: str) -> tuple[str, str]:
    """Where the part of a benchmark begins and ends in a page."""
    return f"<!-- {name}: written by benchmarks/{name}.py -->", f"<!-- end of {name} -->"


def put(name: str, text: str, page: str = "docs/benchmarks.md") -> None:
    """Replace what a benchmark found before."""
    begin, end = marks(name)
    path = ROOT / page
    before, here, rest = path.read_text(encoding="utf-8").partition(begin)
    _, there, after = rest.partition(end)
    if not (here and there):
        raise SystemExit(f"{page} has no place for it: write {begin} and {end} where it belongs")
    path.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")
