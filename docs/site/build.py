"""Build the documentation site, without a network: `make docs`.

    python docs/site/build.py            # into build/docs/html
    python docs/site/build.py --serve    # and look at it: http://localhost:8000

The pages are those that GitHub shows: docs/*.md, and the README of each recipe. They are copied to build/docs/pages,
where links to files outside of docs lead to a page with that file, and where the reference gets its docstrings and the
page of all settings is written. Any warning (a link or heading that is not there, a page that no menu has) is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SITE = Path(__file__).parent
sys.path.insert(0, str(SITE))

import settings  # noqa: E402

ROOT = SITE.parents[1]
PAGES, HTML = ROOT / "build" / "docs" / "pages", ROOT / "build" / "docs" / "html"
PICTURES = ROOT / "docs" / "pictures"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"^\| `([\w.]+)` \|")  # the first cell of a row of docs/reference.md
PROJECT = ("benchmarks", "CHANGELOG", "decisions", "design", "log")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".md": "markdown"}


def collect() -> None:
    """Copy all pages, and write those that are generated."""
    shutil.rmtree(PAGES, ignore_errors=True)
    waiting = pages()
    written = {page: place(page) for page in waiting}
    written[ROOT / "README.md"] = PAGES / "index.md"  # whose page docs/index.md is
    while waiting:  # pages lead to files, which become pages
        page = waiting.pop()
        text = read(page)
        if page.suffix == ".md":
            text = lead(text, page, written, waiting)
        if page.parent == ROOT / "docs" and page.name.startswith("reference"):
            text = expand_reference(text)
        write(written[page], rank(page) + text)
    write(PAGES / "settings.md", settings.write_page())
    shutil.copytree(PICTURES, PAGES / "pictures")
    shutil.copytree(SITE / "assets", PAGES / "assets")


def pages() -> list[Path]:
    """Those that the menu has."""
    return [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("recipes/*/README.md")), ROOT / "CHANGELOG.md"]


def place(page: Path) -> Path:
    """Where a file's page is on the site."""
    relative = page.relative_to(ROOT)
    if relative.parts[0] == "docs":
        return PAGES / relative.relative_to("docs")
    if relative.parts[0] == "recipes" and relative.name == "README.md":
        return PAGES / "recipes" / f"{relative.parts[1]}.md"
    if relative.parent == Path():
        return PAGES / relative.name.lower()
    return PAGES / "source" / (relative if relative.suffix == ".md" else f"{relative}.md")


def read(page: Path) -> str:
    """The text of a page; of a file that is none, its source, and of a folder, its README or its files."""
    relative = page.relative_to(ROOT)
    if page.suffix == ".md":
        return page.read_text("utf-8")
    if page.is_dir():
        return f"# {relative}\n\n" + "\n".join(f"* [{file.name}]({file.name})" for file in sorted(page.glob("*.py")))
    language = LANGUAGES.get(page.suffix, "text")
    return f"# {relative}\n\n````{language}\n{page.read_text('utf-8')}````\n"


def lead(text: str, page: Path, written: dict[Path, Path], waiting: list[Path]) -> str:
    """Let the links of a page lead to the places on the site; what they lead to joins the pages."""

    def replace(match: re.Match[str]) -> str:
        link, anchor = match[2], match[3] or ""
        target = (page.parent / link).resolve()
        if re.match(r"[a-z]+:", link) or not target.exists():
            return match[0]  # the strict build refuses what leads nowhere
        if target.parent == PICTURES:  # copied as they are
            return f"{match[1]}{os.path.relpath(PAGES / 'pictures' / target.name, written[page].parent)}"
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        if target not in written:
            written[target] = place(target)
            waiting.append(target)
        return f"{match[1]}{os.path.relpath(written[target], written[page].parent)}{anchor}"

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(replace, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(replace, text[end:])])


def expand_reference(text: str) -> str:
    """Put the docstrings of the names in a table below it."""
    lines: list[str] = []
    names: list[str] = []
    for line in [*text.splitlines(), ""]:
        if match := NAME.match(line):
            names.append(match[1])
            line = line.replace(f"`{match[1]}`", f"[`{match[1]}`][{full_name(match[1])}]", 1)
        lines.append(line)
        if not line and names:
            lines += [f"::: {full_name(name)}\n" for name in names]
            names.clear()
    return "\n".join(lines)


def full_name(name: str) -> str:
    """Of a public name: `Task` is `unisono.Task`, `audio.decode` is `unisono_audio.decode`."""
    return name.replace("audio.", "unisono_audio.") if name.startswith("audio.") else f"unisono.{name}"


def rank(page: Path) -> str:
    """Pages about the project come after those for its users in a search; pages of source are not found at all."""
    if "source" in place(page).relative_to(PAGES).parts:
        return "---\nsearch: {exclude: true}\nhide: [toc]\n---\n\n"
    return "---\nsearch: {boost: 0.3}\n---\n\n" if page.stem in PROJECT else ""


def write(path: Path, text: str) -> None:
    """Write a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def main() -> None:
    """Build the site, and serve it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="serve the site on this host after it is built")
    serve = parser.parse_args().serve
    collect()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", ROOT / "mkdocs.yml"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout.partition("Traceback")[0])
    sys.stdout.write(f"{HTML / 'index.html'}\n")
    if serve:
        handler = partial(SimpleHTTPRequestHandler, directory=HTML)
        ThreadingHTTPServer(("127.0.0.1", 8000), handler).serve_forever()


if __name__ == "__main__":
    main()
