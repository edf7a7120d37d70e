"""Puts what a benchmark found into a page of the docs, between the benchmark's two marks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def marks(name: str) -> tuple[str, str]:
    """Where the part of a benchmark begins and ends in a page."""
    return f"<!-- {name}: written by benchmarks/{name}.py -->", f"<!-- end of {name} -->"


def put(name: str, text: str, page: str = "docs/benchmarks.md") -> None:
    """Replace what a benchmark found before."""
    before, _, after = _parted(name, page)
    (ROOT / page).write_text(f"{before}\n{text.strip()}\n{after}", encoding="utf-8")


def read_part(name: str, page: str = "docs/benchmarks.md") -> str:
    """What the page has of a benchmark."""
    return _parted(name, page)[1]


def _parted(name: str, page: str) -> tuple[str, str, str]:
    begin, end = marks(name)
    before, here, rest = (ROOT / page).read_text(encoding="utf-8").partition(begin)
    text, there, after = rest.partition(end)
    if not (here and there):
        raise SystemExit(f"{page} has no place for it: write {begin} and {end} where it belongs")
    return before + here, text, there + after
