"""The code of a run: a digest of every source file of Unisono, of the task, and of what it imports.

Files are found by parsing import statements at any depth, so a function's local import counts before it has run, and
modules that happen to be loaded do not. Not found: modules with computed names (`import_module(f"models.{name}")`), and
files that code reads as data. Installed packages are identified by their versions.
"""

from __future__ import annotations

import ast
import hashlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

from unisono.config.code import recipes, references
from unisono.runtime.code.source_files import PLUGIN_GROUPS, installed_packages, is_library_file


def digest_sources(recipe: str, engine: str = "auto") -> dict[str, str]:
    """Return the SHA-256 of every source file, normalising line ends.

    A file is named after its module, e.g. `models/net.py` for `models.net`, so a project may be moved.

    Args:
        recipe: As named in a configuration; its task must have been imported, which extends `sys.path`.
        engine: `layout.engine`, which selects among the tasks of a recipe.
    """
    return _unisono_digests() | digest_task_sources(recipe, engine)


def digest_task_sources(recipe: str, engine: str = "auto") -> dict[str, str]:
    """Return the SHA-256 of the files of the task and of what it imports alone; see `digest_sources`."""
    files = _task_sources(recipe, engine)
    return {name: _read_digest(str(path), *_stamp(path.stat())) for name, path in files.items()}


def digest_task_files(reference: str) -> dict[str, str]:
    """Return the same by the files' paths, without importing the class of the reference, before or now."""
    place = reference if reference.endswith(".py") else reference.rpartition(":")[0]
    with references.search_path(Path(place).resolve()) if place.endswith(".py") else nullcontext():
        return {str(path): _file_digest(path) for path in _task_sources(reference, "auto").values()}


def _task_sources(recipe: str, engine: str) -> dict[str, Path]:
    files: dict[str, Path] = {}
    named = recipes.resolve_reference(recipe, engine) if recipe in recipes.recipe_names() else recipe
    place = named.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        pass  # a task whose file is gone, or never existed, has no readable code
    elif place.endswith(".py"):
        path = Path(place).resolve()
        files |= _project_files(references.find_package(path)[1] or path.stem, path)
    elif place:  # empty for a recipe without a file, as callers of `unisono.training.loop` may have
        files |= _project_files(place, None)
    return files


def describe_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe each file that differs in one phrase.

    >>> describe_changes({"a.py": "1", "b.py": "1"}, {"a.py": "2", "c.py": "1"})
    ['a.py has changed', 'b.py is gone', 'c.py is new']
    """
    return [
        f"{name} {'is new' if name not in before else 'is gone' if name not in now else 'has changed'}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _project_files(task: str, path: Path | None) -> dict[str, Path]:
    """Return the files of a task's module and of all user modules that it imports, directly or indirectly."""
    own = {task.partition(".")[0], *installed_packages(*PLUGIN_GROUPS)}  # count even if they are installed
    found: dict[str, Path] = {}
    waiting = list(_modules_run_by(task, own))
    if path is not None:  # a given file takes precedence over any other module of that name
        waiting = [(name, place) for name, place in waiting if name != task] + [(task, path)]
    while waiting:
        name, place = waiting.pop()
        packaged = place.stem == "__init__"
        file = name.replace(".", "/") + ("/__init__" if packaged else "") + place.suffix
        if file in found:
            continue
        found[file] = place
        if place.suffix == ".py":
            for imported in _imported_names(name, str(place), packaged, *_stamp(place.stat())):
                waiting += _modules_run_by(imported, own)
    return found


@cache
def _imported_names(name: str, path: str, packaged: bool, *stamp: int) -> tuple[str, ...]:
    """Return every dotted name in a source file that may be an imported module; read again once it is written again."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):  # imported late or not at all; its digest counts in any case
        return ()
    return tuple(_names_in(tree, name, packaged))


def _names_in(tree: ast.Module, name: str, packaged: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                parts = name.split(".")
                above = parts[: len(parts) - node.level + packaged] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                yield from (f"{base}.{alias.name}" for alias in node.names if base)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(literal)), *_],
            ):
                yield literal


def _modules_run_by(dotted: str, own: Set[str]) -> Iterator[tuple[str, Path]]:
    """Return the user's modules that importing a dotted name runs: parent packages first, then the module itself."""
    parts, search = dotted.split("."), None
    if parts[0] == "unisono":
        return
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        spec = _find_spec(name, search)
        if spec is None:  # an attribute of the parent module
            return
        if spec.has_location and spec.origin:
            path = Path(spec.origin).resolve()
            if not path.is_file() or (parts[0] not in own and is_library_file(str(path))):
                return
            yield name, path
        if spec.submodule_search_locations is None:
            return
        search = list(spec.submodule_search_locations)


def _find_spec(name: str, search: Sequence[str] | None) -> ModuleSpec | None:
    """Find a module on `sys.path`, or inside a package that need not have been imported."""
    if search is None:
        specs = (finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        return next(filter(None, specs), None)
    inside = (importer.find_spec(name) for place in search if (importer := pkgutil.get_importer(place)) is not None)
    found = [spec for spec in inside if spec is not None]
    return next((spec for spec in found if spec.loader), next(iter(found), None))  # namespace packages come last


def _unisono_digests() -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = [(str(Path(__file__).resolve().parents[2]), "unisono")]
    while waiting:
        folder, name = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    found[f"{name}/{entry.name}"] = _read_digest(entry.path, *_stamp(entry.stat()))
                elif entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                    waiting.append((entry.path, f"{name}/{entry.name}"))
    return dict(sorted(found.items()))


def _stamp(facts: os.stat_result) -> tuple[int, int, int]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


@cache
def _read_digest(path: str, *stamp: int) -> str:
    """Of a file that is read once for as long as it is not written again."""
    return _file_digest(Path(path))


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
