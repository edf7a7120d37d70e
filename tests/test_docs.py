"""The pages lead where they say: files, headings, and tests by their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "packages", ROOT / "recipes")
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^(?: {4}[^\n]*|```.*?^```)$", re.MULTILINE | re.DOTALL)
_TESTS = {
    name
    for folder in ("tests", "packages", "recipes")
    for path in (ROOT / folder).rglob("*.py")
    if "tests" in path.relative_to(ROOT).parts
    for name in (path.stem, *re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE))
}


def _anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    broken = []
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken, f"{page.relative_to(ROOT)} links to what is not there: {', '.join(broken)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"\b(test_[a-z0-9_]+[a-z0-9])(?:\.py)?\b", page.read_text()))
    assert named <= _TESTS, f"{page.relative_to(ROOT)} names tests that do not exist: {sorted(named - _TESTS)}"
