"""Lines, modules and imports of each package of the workspace, and what an installation of it takes.

    python -m benchmarks.packages                     lines, modules, imports
    python -m benchmarks.packages --install language  also: distributions and MB of an empty environment with a recipe

An environment is made in a temporary folder, by `pip install -c constraints.txt -e packages/unisono -e recipes/NAME`.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--install", metavar="RECIPE", help="a recipe to install beside the core")
    given = parser.parse_args()
    print("| package | lines | modules | imports of other packages of ours |\n|---|---|---|---|")
    for source in sorted([*given.root.glob("packages/*/src/*"), *given.root.glob("recipes/*/src/*")]):
        files = sorted(source.rglob("*.py"))
        if files and source.suffix != ".egg-info":
            lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
            found = sorted({name for file in files for name in imported(file)} - {source.name})
            print(f"| `{source.name}` | {lines:,} | {len(files)} | {', '.join(found) or '–'} |")
    if given.install:
        print(measure_installation(given.root, given.install))


def imported(file: Path) -> Iterator[str]:
    """Our packages that a file imports, at any depth."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        yield from (name.split(".")[0] for name in names if name.split(".")[0].startswith("unisono"))


def measure_installation(root: Path, recipe: str) -> str:
    """What the core and a recipe take in an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python, began = Path(folder) / "bin/python", time.perf_counter()
        pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        where = ["-e", root / "packages/unisono", "-e", root / "recipes" / recipe]
        subprocess.run(
            [*map(str, pip), "install", "-c", str(root / "constraints.txt"), *map(str, where)], check=True, cwd=root
        )
        seconds = time.perf_counter() - began
        listed = subprocess.run([*map(str, pip), "list", "--format=freeze"], capture_output=True, text=True, check=True)
        size = sum(path.lstat().st_size for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink())
        count = len(listed.stdout.split())
        return f"core and {recipe}: {count} distributions, {size / 1e6:.0f} MB, installed in {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
