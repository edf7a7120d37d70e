"""From composed values to a typed `RunConfig`, with every mistake reported at once and in the user's words."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from unisono.config import compose as compose_
from unisono.config import recipes, safe_yaml, secrets
from unisono.config.compose import Composed, compose
from unisono.config.schema.data import Data
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError, nearest

if TYPE_CHECKING:
    from unisono.task import Task

TASK_GROUPS = {"task": "Config", "model": "Model", "data": "Data"}


def load(recipe: str, overrides: Sequence[str] = (), config_dir: Path | None = None) -> tuple[RunConfig, Composed]:
    """Compose and validate; see `compose` for the arguments.

    Raises:
        ConfigError: one line per mistake: the key, the value, where it came from, and the nearest valid key.
    """
    composed = compose(recipe, overrides, config_dir)
    return validate(composed), composed


def read(path: Path, task: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run, from its `config.yaml`, for a task that the caller names.

    What the file itself names as its task is never imported: a file of a run may come from anywhere. Whoever has no
    task to name asks `unisono.config.foreign_run`.

    Args:
        path: of the file.
        task: reference of the task whose settings these are.
        overrides: settings that replace those of the run. Where one chooses another `kind` of a group, what the run has
            stays as far as that kind has it.

    Raises:
        ConfigError: where the file is missing or is not a configuration.
    """
    values = {**safe_yaml.read(path), "recipe": task}
    composed = Composed(values, {name: str(path) for name in values})
    return validate(_changed(composed, overrides) if overrides else composed)


def _changed(composed: Composed, overrides: Sequence[str]) -> Composed:
    reference = str(composed.values.get("recipe"))
    task, folders = task_class(reference), [compose_.GROUPS]
    if reference in recipes.names():
        folders.insert(0, recipes.folder(reference))
    changed = compose_.change(composed, overrides, folders)
    for group, attribute in TASK_GROUPS.items():
        before, now = composed.values.get(group) or {}, changed.values.get(group) or {}
        if before.get("kind") == now.get("kind") or "kind" not in before:
            continue
        known = {name for model in _models(getattr(task, attribute), now) for name in model.model_fields}
        given = {
            key.removeprefix(f"{group}.").split(".")[0] for key in changed.origins.keys() - composed.origins.keys()
        }
        changed.values[group] = {name: value for name, value in now.items() if name in known | given}
    return changed


def validate(composed: Composed) -> RunConfig:
    """A typed configuration from composed values; see `load`."""
    values = composed.values
    if not isinstance(values.get("recipe"), str):
        raise ConfigError("the configuration does not say its task: set recipe=NAME or recipe=path/to/file.py:Class")
    secrets.refuse(values)  # before any error that repeats a value
    kind = task_class(values["recipe"])
    mistakes: list[str] = []
    typed: dict[str, Any] = {}
    for group, attribute in TASK_GROUPS.items():
        try:
            typed[group] = TypeAdapter(getattr(kind, attribute)).validate_python(
                values.get(group) or {}, extra="forbid"
            )
        except ValidationError as error:
            mistakes += _sentences(error, composed, kind, group)
    try:
        config = RunConfig.model_validate({**values, **{group: {} for group in TASK_GROUPS}})
    except ValidationError as error:
        mistakes += _sentences(error, composed, kind)
    if mistakes:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))
    if not isinstance(typed["data"], Data):
        raise ConfigError(f"{values['recipe']}: the task's Data type must extend unisono.config.schema.run.Data")
    secrets.refuse({group: settings.model_dump() for group, settings in typed.items()})  # also those of secret types
    return config.model_copy(update=typed)


def task_class(reference: str) -> type[Task]:
    """The task that a config names: a packaged recipe, `path/to/file.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: where the file, the class or one of its methods is missing.
    """
    from unisono.task import Task

    place, _, name = located(reference).rpartition(":")
    module = module_of(reference, place)
    found = getattr(module, name, None)
    tasks = [n for n, v in vars(module).items() if inspect.isclass(v) and issubclass(v, Task) and v is not Task]
    if found is None:
        raise ConfigError(f"{place} has no class '{name}', {nearest(name, tasks)}")
    if not (inspect.isclass(found) and issubclass(found, Task)):
        raise ConfigError(f"{reference} is not a unisono.Task")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{reference} does not define {', '.join(f'{method}()' for method in missing)}")
    return found


def located(reference: str) -> str:
    """The `file.py:Class` or `package.module:Class` of a reference, which may be the name of a recipe.

    Raises:
        ConfigError: for a name that is no recipe.
    """
    return reference if ":" in reference else recipes.find(reference).task()


def module_of(reference: str, place: str) -> types.ModuleType:
    """The module of a reference: `path/to/file.py` is run from the file, `package.module` is imported.

    Raises:
        ConfigError: where it is missing.
    """
    return _from_file(Path(place)) if place.endswith(".py") else _from_package(place, reference)


def lasting(reference: str) -> str:
    """The same reference, such that it holds in any working directory."""
    place, _, name = reference.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else reference


def _from_package(module: str, reference: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module + ".").startswith(error.name + "."):
            raise ConfigError(f"{reference}: there is no module '{module}'") from error
        extra = module.removeprefix("unisono.recipes.").split(".")[0]
        raise ConfigError(f"{reference} needs the package '{error.name}': pip install 'unisono[{extra}]'") from error


def _from_file(path: Path) -> types.ModuleType:
    """A module from a file: of its package, if it lies in one, so that its relative imports work; else on its own.

    Its name is derived from the path, so importing it twice gives the same module. A script that trains a task of its
    own is that module already: it must not run a second time.
    """
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a task is given as path/to/file.py:Class")
    if str(path) == str(Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()):
        return sys.modules["__main__"]
    root, packaged = in_package(path)
    if packaged:
        for position, folder in ((0, root), (len(sys.path), path.parent)):  # the latter as below, but after all others
            if str(folder) not in sys.path:
                sys.path.insert(position, str(folder))
        found = importlib.import_module(packaged)
        if str(Path(found.__file__ or "").resolve()) == str(path):  # else another package has taken the name
            return found
    name = "unisono_task_" + "_".join(path.with_suffix("").parts[-2:]).replace("-", "_").replace("/", "")
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` would, for the modules beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not be found by the next attempt
        raise
    return module


def in_package(path: Path) -> tuple[Path, str]:
    """The folder from which a file is imported, and its dotted name there; no name if it lies in no package."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts) if len(parts) > 1 else ""


# mistakes, in the user's words ------------------------------------------------------------------------------------


def _sentences(error: ValidationError, composed: Composed, kind: type[Task], group: str | None = None) -> Iterator[str]:
    for mistake in error.errors():
        values = composed.values.get(group) if group else composed.values
        parts = [*([group] if group else []), *_without_tags(mistake["loc"], values, mistake["type"])]
        dotted = ".".join(str(part) for part in parts)
        origin = composed.origin(dotted)
        if mistake["type"] == "extra_forbidden":
            yield f"unknown key '{dotted}' ({origin}), {_suggestion(parts, composed.values, kind)}"
        elif mistake["type"] == "missing":
            yield f"'{dotted}' is missing"
        elif mistake["type"] in ("union_tag_not_found", "union_tag_invalid"):
            name = str(mistake["ctx"]["discriminator"]).strip("'")
            tags = ", ".join(_tags(parts, name, composed.values, kind))
            if "tag" in mistake["ctx"]:
                origin = composed.origin(f"{dotted}.{name}")
                yield f"'{dotted}.{name}' must be one of: {tags}, got {mistake['ctx']['tag']!r} ({origin})"
            else:
                yield f"'{dotted}.{name}' is missing; choose one of: {tags}"
        elif mistake["type"] == "value_error":
            text = str(mistake["ctx"]["error"])  # ours names its keys itself; that of a task may not
            yield text if dotted in text else f"'{dotted}': {text}, got {mistake['input']!r} ({origin})"
        elif mistake["type"] in ("model_type", "dict_type", "model_attributes_type"):
            keys = ", ".join(f"{dotted}.{name}" for name in _children_at(parts, composed.values, kind))
            yield f"'{dotted}' is a group of keys, not a value ({origin})" + (f"; set one of {keys}" if keys else "")
        else:
            yield f"'{dotted}': {mistake['msg'][0].lower() + mistake['msg'][1:]}, got {mistake['input']!r} ({origin})"


def _without_tags(loc: Sequence[int | str], values: Any, error: str) -> list[int | str]:
    """The path of an error in the user's keys: pydantic mixes in the tags of unions and the names of their branches."""
    parts: list[int | str] = []
    for position, part in enumerate(loc):
        inside = dict(enumerate(values)) if isinstance(values, list) else values if isinstance(values, dict) else {}
        if part in inside:
            values = inside[part]
        elif error != "missing" or position < len(loc) - 1:
            continue
        parts.append(part)
    return parts


def _suggestion(parts: Sequence[int | str], values: Any, kind: type[Task]) -> str:
    """The same key elsewhere, else the nearest key here, else all keys here."""
    above = "".join(f"{part}." for part in parts[:-1])
    word = str(parts[-1])
    same = next((key for key in _leaves(RunConfig, {}, kind) if key.endswith(f".{word}") and key != above + word), None)
    if same:
        return f"did you mean '{same}'?"
    hint = nearest(word, [str(name) for name in _children_at(parts[:-1], values, kind)])
    return hint.replace("'", f"'{above}", 1) if hint.startswith("did you mean") else hint


def _children_at(parts: Sequence[int | str], values: Any, kind: type[Task]) -> dict[Any, Any]:
    """Names and types of the keys below a path."""
    return _children(*_at(parts, values, kind), kind)


def _tags(parts: Sequence[int | str], name: str, values: Any, kind: type[Task]) -> list[str]:
    """The values that tell the branches of the union at a path from each other."""
    annotation, _ = _at(parts, values, kind)
    return [str(tag) for model in _models(annotation, None) for tag in _literals(model, name)]


def _at(parts: Sequence[int | str], values: Any, kind: type[Task]) -> tuple[Any, Any]:
    """The annotation at a path, and the value there if there is one."""
    annotation: Any = RunConfig
    for part in parts:
        annotation = _children(annotation, values, kind).get(part, Any)
        inside = dict(enumerate(values)) if isinstance(values, list) else values if isinstance(values, dict) else {}
        values = inside.get(part)
    return annotation, values


def _children(annotation: Any, values: Any, kind: type[Task]) -> dict[Any, Any]:
    """Names and types of the keys below an annotation; unions are resolved by the `kind` that is there."""
    for model in _models(annotation, values):
        fields = {name: field.annotation for name, field in model.model_fields.items()}
        if model is RunConfig:
            fields.update({group: getattr(kind, attribute) for group, attribute in TASK_GROUPS.items()})
        return fields
    if get_origin(annotation) is dict:
        return dict.fromkeys(values if isinstance(values, dict) else (), get_args(annotation)[1])
    if get_origin(annotation) is list and isinstance(values, list):
        return dict.fromkeys(range(len(values)), get_args(annotation)[0])
    return {}


def _models(annotation: Any, values: Any) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        yield from _models(get_args(annotation)[0], values)
    elif get_origin(annotation) in (Union, types.UnionType):
        branches = [model for branch in get_args(annotation) for model in _models(branch, values)]
        wanted = values.get("kind") if isinstance(values, dict) else None
        yield from (model for model in branches if wanted is None or wanted in _literals(model, "kind"))
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation


def _literals(model: type[BaseModel], name: str) -> tuple[Any, ...]:
    field = model.model_fields.get(name)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _leaves(annotation: Any, values: Any, kind: type[Task], prefix: str = "") -> Iterator[str]:
    for name, child in _children(annotation, values, kind).items():
        dotted = f"{prefix}.{name}" if prefix else str(name)
        yield dotted
        yield from _leaves(child, {}, kind, dotted)
