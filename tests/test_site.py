"""The documentation site: complete, built without a network, and usable in a browser that has none."""

from __future__ import annotations

import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

import unisono
from tests import browser
from unisono import recipe_tools

ROOT = Path(__file__).parents[1]
HTML, PICTURES = ROOT / "build" / "docs" / "html", ROOT / "build" / "docs" / "pictures"
SETTINGS = runpy.run_path(str(ROOT / "docs" / "site" / "settings.py"))
PICTURE = re.compile(r"!\[[^\]]*\]\(([^):]+)\)")
NAME = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)


def menu() -> list[str]:
    """The pages that the menu leads to."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    return leaves(yaml.safe_load(f"nav:{text}")["nav"])


def leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in leaves(part)]


def test_every_page_of_docs_and_every_recipe_is_in_the_menu_once() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    recipes = {f"recipes/{path.parent.name}.md" for path in ROOT.glob("recipes/*/README.md")}
    assert sorted(menu()) == sorted({*pages, *recipes, "settings.md", "changelog.md"})


def test_what_the_pages_lead_to_can_be_shown_and_their_pictures_are_where_they_look_for_them(tmp_path: Path) -> None:
    """The part of `make docs` that needs no mkdocs."""
    build = runpy.run_path(str(ROOT / "docs" / "site" / "build.py"))
    site = build["collect"].__globals__
    site.update(PAGES=tmp_path, expand_reference=lambda text: text)
    site["settings"] = type("Settings", (), {"write_page": staticmethod(str)})
    build["collect"]()
    pictures = [(page, link) for page in tmp_path.rglob("*.md") for link in PICTURE.findall(page.read_text("utf-8"))]
    assert {Path(link).suffix for _, link in pictures} >= {".svg", ".png"}
    assert [(page.name, link) for page, link in pictures if not (page.parent / link).is_file()] == []


def test_every_public_name_is_on_the_page_of_the_reference() -> None:
    named = NAME.findall((ROOT / "docs" / "reference.md").read_text("utf-8"))
    tools = [f"recipe_tools.{name}" for name in recipe_tools.__all__]
    assert sorted(named) == sorted([*(set(unisono.__all__) - {"__version__"}), *tools]), "docs/reference.md"


def test_every_public_name_of_audio_is_on_the_page_of_its_reference() -> None:
    audio = pytest.importorskip("unisono_audio")
    named = NAME.findall((ROOT / "docs" / "reference-audio.md").read_text("utf-8"))
    assert sorted(named) == sorted(f"audio.{name}" for name in audio.__all__), "docs/reference-audio.md"


@pytest.mark.parametrize(
    ("face", "name"),
    [(face, name) for face in (unisono, recipe_tools) for name in face.__all__ if name not in ("__version__", "Batch")],
)
def test_nothing_public_is_undocumented(face: Any, name: str) -> None:
    """`Batch` is an alias of `dict`, which the page explains."""
    value = getattr(face, name)
    assert inspect.getdoc(value), f"unisono.{name} has no docstring"
    if inspect.isclass(value) and not issubclass(value, Exception):
        methods = [own for own in vars(value) if not own.startswith("_") and inspect.isroutine(vars(value)[own])]
        methods = [own for own in methods if own not in vars(value).get("__annotations__", {})]  # fields with a default
        bare = [own for own in methods if not inspect.getdoc(getattr(value, own))]
        assert not bare, f"methods of unisono.{name} without a docstring: {', '.join(bare)}"


def test_every_setting_is_on_the_page_of_settings_with_a_type_and_a_reader() -> None:
    page = SETTINGS["write_page"]()
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| (.*?) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    run = page.partition("\n## Words of verbs")[0]
    assert len(rows) > 150
    for key in ("layout.strategy", "checkpoint.keep_best.metric", "optim.groups[].lr_scale", "launch.deadlines.data"):
        assert f"| `{key}` |" in run
    unread = [
        key for key, _, _, meaning in rows if f"| `{key}` |" in run and "read by" in meaning and "by <" in meaning
    ]
    assert not unread, f"nothing reads these settings: {', '.join(unread)}"
    assert all(kind for _, kind, _, _ in rows)


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """The site, built anew; workers of pytest have it one after the other."""
    HTML.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(HTML.parent.with_suffix(".lock"), timeout=600):
        done = subprocess.run([sys.executable, ROOT / "docs" / "site" / "build.py"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        yield HTML


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_a_network(site: Path) -> None:
    """A link to a page or heading that does not exist is a warning, and each is an error here."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    loads = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?https?:|<link[^>]*\shref=\"?https?:[^>]*stylesheet")
    foreign = [str(page.relative_to(site)) for page in pages if loads.search(page.read_text("utf-8"))]
    assert not foreign, f"pages that load from a network: {foreign}"
    text = (site / "reference.html").read_text("utf-8")
    assert all(f'id="unisono.{name}"' in text for name in ("Task", "Loss", "train", "open_source"))


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this host (Debian: apt install chromium)")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_a_reader_without_a_network_goes_from_the_first_page_to_the_tutorial_and_searches(
    site: Path, tmp_path: Path, width: int, height: int
) -> None:
    """Opened from its folder, by file:; screenshots are left in build/docs/pictures, to be looked at."""
    with browser.browser(tmp_path) as tab:
        tab.size(width, height, phone=width < 600)
        tab.open((site / "index.html").as_uri())
        assert tab.evaluate("document.querySelector('h1').innerText").startswith("Train on many processes")
        assert tab.wait("document.querySelector('article img').naturalWidth > 100"), "the picture is not shown"
        tab.photograph(PICTURES / f"index-{width}.png")

        tab.evaluate("[...document.querySelectorAll('article a')].find(a => a.innerText === 'Start here').click()")
        tab.wait("document.querySelector('h1')?.innerText.startsWith('Tutorial')")
        tab.photograph(PICTURES / f"tutorial-{width}.png")

        for page in ("questions", "settings", "reference", "recipes/language", "diagnoses", "benchmarks"):
            tab.open((site / f"{page}.html").as_uri())
            wide = tab.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{page} is {wide} pixels wide in a window of {width}"
            tab.photograph(PICTURES / f"{page.replace('/', '-')}-{width}.png")

        tab.evaluate("document.querySelector('.md-search__button, label[for=__search]').click()")
        tab.wait("document.activeElement?.matches('input') || document.activeElement?.shadowRoot?.activeElement")
        tab.write("resume")
        found = tab.wait(SEARCHED)
        tab.photograph(PICTURES / f"search-{width}.png")
        assert any("runs.html" in url or "tutorial.html" in url for url in found), found
        assert not [url for url in tab.requested if url.startswith("http")]


# The links of the results; they stand in a shadow root.
SEARCHED = """(() => {
  const roots = [document, ...[...document.querySelectorAll("*")].map(e => e.shadowRoot).filter(Boolean)];
  const links = roots.flatMap(root => [...root.querySelectorAll("a")]).map(a => a.href);
  const found = links.filter(url => url.includes("?h=") || url.includes("h=resume"));
  return found.length > 3 && found;
})()"""
