"""Lines, modules and imports of each package of the workspace, and what an installation of it takes.

    python -m benchmarks.packages                     lines, modules, imports
    python -m benchmarks.packages --install language  also: distributions and MB of an empty environment with a recipe
    python -m benchmarks.packages --since 9db32de     what the modules of a commit have become, and what is new

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--install", metavar="RECIPE", help="a recipe to install beside the core")
    parser.add_argument("--since", metavar="COMMIT", help="compare with this commit of the checkout")
    given = parser.parse_args()
    if given.since:
        print("\n".join(compare(given.root, given.since)))
        return 0
    print("| package | lines | modules | imports of other packages of ours |\n|---|---|---|---|")
    for source in sorted([*given.root.glob("packages/*/src/*"), *given.root.glob("recipes/*/src/*")]):
        files = sorted(source.rglob("*.py"))
        if files and source.suffix != ".egg-info":
            lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
            found = sorted({name for file in files for name in imported(file)} - {source.name})
            print(f"| `{source.name}` | {lines:,} | {len(files)} | {', '.join(found) or '–'} |")
    if given.install:
        print(measure_installation(given.root, given.install))
    return 0


def compare(root: Path, commit: str) -> Iterator[str]:
    """Rows of a table: lines of the modules of a commit then and now, and those of modules that are new.

    A module that has moved is the same one if 30 % of its lines are; one that is gone has no lines now.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout

    def package(path: str) -> str:
        return Path(path).parts[3]

    then: dict[str, int] = {}
    places = [f":(glob){folder}/*/src/**/*.py" for folder in ("packages", "recipes")]
    for path in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if path.startswith(("packages/", "recipes/")) and "/src/" in path and path.endswith(".py"):
            then[path] = git("show", f"{commit}:{path}").count("\n")
    now = {path: (root / path).read_text("utf-8").count("\n") for path in git("ls-files", *places).splitlines()}
    moved = {path: path for path in now if path in then}
    for line in git("diff", "-M30%", "--name-status", "--diff-filter=R", commit, "--", *places).splitlines():
        _, old, new = line.split("\t")
        moved[new] = old
    yield "| package | its modules then | lines | of them now | lines | gone | new modules | lines |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in sorted({package(path) for path in now}):
        before = {path: lines for path, lines in then.items() if package(path) == name}
        kept = [path for path, old in moved.items() if old in before]
        new = [path for path in now if package(path) == name and path not in moved]
        yield (
            f"| `{name}` | {len(before)} | {sum(before.values()):,} | {len(kept)} | {sum(now[p] for p in kept):,} "
            f"| {len(before) - len(kept)} | {len(new)} | {sum(now[p] for p in new):,} |"
        )


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
