"""Which libraries a task will import, read from its source: a fork server can import them while the run is prepared.

The task's own code is never imported for this, and of libraries only those that are known to start no thread, open no
device and read no rank where they are imported. What is not found here the ranks import themselves, as ever.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from unisono.config import recipes, references

KNOWN = frozenset(
    """
    einops h5py matplotlib numba numpy pandas peft PIL safetensors scipy skbio sklearn sympy timm tokenizers tqdm
    torchaudio torchvision transformers
    """.split()  # noqa: SIM905
)


def modules_of(reference: str) -> list[str]:
    """The libraries that the files of a task import, those in its folder too where that is a package.

    Args:
        reference: to the task.
    """
    place = (references.located(reference) if reference in recipes.names() else reference).rpartition(":")[0]
    file = Path(place) if place.endswith(".py") else _file_of(place)
    if file is None or not file.is_file():
        return []
    packaged = (file.parent / "__init__.py").is_file()
    files = sorted(file.parent.glob("*.py")) if packaged else [file]
    found = {name for each in files for name in _imported(each)}
    return sorted(name for name in found if name.partition(".")[0] in KNOWN)


def _file_of(module: str) -> Path | None:
    """The file of a module, found without importing it; its packages are."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module) if module else None
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def _imported(path: Path) -> Iterator[str]:
    """The modules that a source file imports where it is imported itself, or in a function."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
