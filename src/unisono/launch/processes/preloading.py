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
from unisono.runtime.errors import ConfigError

PRELOADABLE = frozenset(
    """
    einops h5py matplotlib numba numpy pandas peft PIL safetensors scipy sklearn sympy timm tokenizers tqdm
    torchaudio torchvision transformers
    """.split()  # noqa: SIM905
)


def is_jax(reference: str) -> bool:
    """Whether a task looks as if it were written in JAX, so that nothing of torch need be imported for its processes.

    A guess, which costs time where it is wrong and nothing else: who starts processes asks the layout. A recipe says
    it of its first task.
    """
    if reference in recipes.recipe_names():
        with suppress(ConfigError):  # reported later, by whoever needs the task
            return recipes.find_recipe(reference).engine == "jax"
        return False
    libraries = {name.partition(".")[0] for file in _task_files(reference) for name in _imported_modules(file)}
    return "jax" in libraries and "torch" not in libraries


def find_libraries(reference: str) -> list[str]:
    """The libraries that the files of a task import, those in its folder too where that is a package.

    Args:
        reference: to the task.
    """
    found = {name for file in _task_files(reference) for name in _imported_modules(file)}
    return sorted(name for name in found if name.partition(".")[0] in PRELOADABLE)


def _task_files(reference: str) -> list[Path]:
    """The file of a task, and those beside it where it lies in a package."""
    place = (references.resolve_reference(reference) if reference in recipes.recipe_names() else reference).rpartition(
        ":"
    )[0]
    file = Path(place) if place.endswith(".py") else _module_file(place)
    if file is None or not file.is_file():
        return []
    packaged = (file.parent / "__init__.py").is_file()
    return sorted(file.parent.glob("*.py")) if packaged else [file]


def _module_file(module: str) -> Path | None:
    """The file of a module, found without importing it; its packages are."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module) if module else None
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def _imported_modules(path: Path) -> Iterator[str]:
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
