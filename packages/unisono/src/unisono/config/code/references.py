"""From the name of a task or callback to its module.

A name is `path/to/file.py:Name`, or `package.module:Name`; of a file with one task, its path alone. That of a recipe is
resolved to such a name by `unisono.config.code.recipes`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from unisono.runtime.code.user_code import format_user_error
from unisono.runtime.errors import ConfigError, UnisonoError, nearest

T = TypeVar("T")
_MODULE_PREFIX = "unisono_task_"  # of the modules of files that lie in no package


def names_code(reference: str) -> bool:
    """Whether a reference names a class or a file of code, and not a recipe."""
    return ":" in reference or reference.endswith(".py")


def complete_reference(reference: str, base: type[T]) -> str:
    """The reference with its class: a file that is named alone has one that extends `base`; others stay as they are.

    Classes that the file imports are not meant, nor are those that other classes of the file complete.

    Raises:
        ConfigError: where the file is missing, or has none of that kind, or several.
    """
    if not reference.endswith(".py"):
        return reference
    module = load_module(reference, reference)
    found = {
        name: kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind.__module__ == module.__name__
    }
    whole = [name for name, kind in found.items() if not inspect.isabstract(kind)] or list(found)
    if not whole:
        raise ConfigError(
            f"{reference} has no class that extends unisono.{base.__name__}. docs/tutorial.md shows one in 40 lines; a "
            f"training script stays as it is, and is checked by:\n  unisono prove {reference} worlds=[1,2]"
        )
    if len(whole) > 1:
        named = " or ".join(f"{reference}:{name}" for name in whole)
        raise ConfigError(f"{reference} has {len(whole)} tasks; write which one: {named}")
    return f"{reference}:{whole[0]}"


def load_class(reference: str, resolved: str, base: type[T]) -> type[T]:
    """The class of a reference, which has to extend `base`, a class of the public face.

    Args:
        reference: as the user wrote it.
        resolved: as `file.py:Class` or `package.module:Class`.
        base: the class that it extends.

    Raises:
        ConfigError: where the file or the class is missing, or is of another kind.
    """
    place, _, name = resolved.rpartition(":")
    if not place or not name:
        raise ConfigError(f"'{reference}' names no class; it is given as path/to/file.py:Class or package.module:Class")
    module = load_module(reference, place)
    kinds = {n: v for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, base) and v is not base}
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{place} has no class '{name}', {nearest(name, kinds)}")
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{reference} is not a unisono.{base.__name__}")
    return found


def load_module(reference: str, place: str) -> types.ModuleType:
    """The module of a reference: `path/to/file.py` is run from the file, `package.module` is imported.

    Raises:
        ConfigError: where it is missing.
    """
    return _import_file(Path(place)) if place.endswith(".py") else _import_package(place, reference)


def absolute_reference(reference: str) -> str:
    """The same reference, such that it holds in any working directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else reference


def _import_package(module: str, reference: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module + ".").startswith(error.name + "."):
            raise ConfigError(f"{reference}: there is no module '{module}'") from error
        package = module.partition(".")[0]
        wanted = f"'unisono[{package.removeprefix('unisono_')}]'" if package.startswith("unisono_") else error.name
        raise ConfigError(f"{reference} needs the package '{error.name}': pip install {wanted}") from error


def _import_file(path: Path) -> types.ModuleType:
    """A module from a file: of its package, if it lies in one, so that its relative imports work; else on its own.

    Its name is derived from the path, so importing it twice gives the same module. A script that trains a task of its
    own is that module already: it must not run a second time.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a task is given as path/to/file.py, or path/to/file.py:Class")
    if str(path) == str(Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()):
        return sys.modules["__main__"]
    _extend_search_path(path)
    packaged = find_package(path)[1]
    if packaged:
        with explain_errors(f"{path} cannot be imported"):
            found = importlib.import_module(packaged)
        if str(Path(found.__file__ or "").resolve()) == str(path):  # else another package has taken the name
            return found
    name = _module_name(path)
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with explain_errors(f"{path} cannot be imported"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found by the next attempt
        raise
    return module


def register_class(path: Path, kind: type) -> None:
    """Let a file stand for a class that this process already has, from a cell that the file was written after.

    Args:
        path: of the file, absolute.
        kind: the class; whoever imports it from the file, in this process, has this very object.
    """
    module = types.ModuleType(_module_name(path))
    module.__file__ = str(path)
    setattr(module, kind.__name__, kind)
    sys.modules[module.__name__] = module


def registered_file(kind: type) -> str | None:
    """The file that stands for a class since `register_class`; None for any other class."""
    if kind.__module__ != "__main__":
        return None
    prefix = _MODULE_PREFIX
    named = (module for name, module in list(sys.modules.items()) if name.startswith(prefix))
    return next((module.__file__ for module in named if getattr(module, kind.__name__, None) is kind), None)


def _module_name(path: Path) -> str:
    return _MODULE_PREFIX + "_".join(path.with_suffix("").parts[-2:]).replace("-", "_").replace("/", "")


@contextmanager
def explain_errors(what: str) -> Iterator[None]:
    """Report an error of the user's code without the frames of ours and of the import system.

    Args:
        what: cannot be done then, with the file.

    Raises:
        ConfigError: instead of any error that is not ours already, and of an exit.
    """
    try:
        yield
    except UnisonoError:
        raise
    except (Exception, SystemExit) as error:
        text = format_user_error(error) or "".join(traceback.format_exception_only(error)).rstrip()
        raise ConfigError(f"{what}:\n{text}") from error


def _extend_search_path(path: Path) -> None:
    """Let the modules beside a file be found, as `python file.py` would; those of its package by their whole name."""
    root, packaged = find_package(path)
    places = ((0, root), (len(sys.path), path.parent)) if packaged else ((0, path.parent),)
    for position, folder in places:
        if str(folder) not in sys.path:
            sys.path.insert(position, str(folder))


@contextmanager
def search_path(path: Path) -> Iterator[None]:
    """Within the context, modules are found as they are while a file is imported."""
    before = list(sys.path)
    _extend_search_path(path)
    try:
        yield
    finally:
        sys.path[:] = before


def find_package(path: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and its dotted name there; no name if it lies in no package."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts) if len(parts) > 1 else ""
