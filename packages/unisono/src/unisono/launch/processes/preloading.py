"""Finds the libraries that a task will import, so that a fork server can import them while the run is prepared.

The task's source is read but never imported, and of its libraries only those are preloaded that are known to start no
thread, open no device and read no rank when imported. Anything not found here is imported by the ranks, as usual.
"""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from unisono.config.code import recipes
from unisono.runtime.errors import ConfigError

PRELOADABLE = frozenset(
    """
    einops h5py matplotlib numba numpy pandas peft PIL safetensors scipy sklearn sympy timm tokenizers tqdm
    torchaudio torchvision transformers
    """.split()  # noqa: SIM905
)


def is_jax(reference: str) -> bool:
    """Guess from its imports whether a task is written in JAX, so that its processes need not import torch.

    A wrong guess costs only time: the layout decides in the end. For a recipe, its first task counts.
    """
    if reference in recipes.recipe_names():
        with suppress(ConfigError):  # reported later by the code that needs the task
            return recipes.find_recipe(reference).engine == "jax"
        return False
    libraries = {name.partition(".")[0] for name in _imported_modules(reference)}
    return "jax" in libraries and "torch" not in libraries


def find_libraries(reference: str) -> list[str]:
    """Return the preloadable libraries that a task's files import, including its package's files."""
    return sorted(name for name in _imported_modules(reference) if name.partition(".")[0] in PRELOADABLE)


def imported_libraries() -> list[str]:
    """Return the modules of preloadable libraries that this process has imported, in the order in which it has.

    Some libraries import their parts when they are first used, as transformers does each model; a process that has
    prepared the run knows these parts, and a file does not.
    """
    return [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] in PRELOADABLE and getattr(getattr(module, "__spec__", None), "name", "") == name
    ]


def _task_files(reference: str) -> list[Path]:
    """Return a task's file, and those next to it if it is part of a package."""
    named = recipes.resolve_reference(reference) if reference in recipes.recipe_names() else reference
    place = named if named.endswith(".py") else named.rpartition(":")[0]
    file = Path(place) if place.endswith(".py") else _module_file(place)
    if file is None or not file.is_file():
        return []
    packaged = (file.parent / "__init__.py").is_file()
    return sorted(file.parent.glob("*.py")) if packaged else [file]


def _module_file(module: str) -> Path | None:
    """Return the file of a module, found without importing it; its parent packages are imported."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module) if module else None
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    return None


def _imported_modules(reference: str) -> set[str]:
    """Return the modules that a task's files import, at the top level or inside functions."""
    found: set[str] = set()
    for path in _task_files(reference):
        with suppress(OSError, SyntaxError, ValueError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Import):
                    found.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module)
    return found
