"""From composed values to a typed `RunConfig`, with every mistake reported at once and in the user's words."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from unisono.config.compose import ComposedConfig
from unisono.config.schema import Settings
from unisono.config.schema.data import Data
from unisono.config.schema.optimizers import why_not_offered
from unisono.config.schema.run import RunConfig
from unisono.runtime import secrets
from unisono.runtime.errors import ConfigError, nearest

TASK_GROUPS = {"task": "Config", "model": "Model", "data": "Data"}  # group -> the attribute of a task with its type
Groups = Mapping[str, Any]  # the types of the three groups that belong to a task


class MissingKeysError(ConfigError):
    """A configuration that only lacks keys without a default.

    Attributes:
        values: Those of all other settings, nested.
        keys: Dotted keys that are missing.
    """

    def __init__(self, text: str, values: Mapping[str, Any], keys: Sequence[str]) -> None:
        super().__init__(text)
        self.values, self.keys = values, keys


def task_reference(composed: ComposedConfig) -> str:
    """The reference to its task in a composed configuration, once it plainly holds no secret.

    Raises:
        ConfigError: where there is none, or a value is a secret; before any error that repeats a value.
    """
    recipe = composed.values.get("recipe")
    if not isinstance(recipe, str):
        raise ConfigError("the configuration names no task: set recipe=NAME or recipe=path/to/file.py:Class")
    refuse_secrets(composed.values)
    return recipe


def validate(composed: ComposedConfig, groups: Groups) -> RunConfig:
    """A typed configuration from composed values, without a secret (`task_reference`), and the types of the groups.

    Raises:
        ConfigError: one line per mistake: the key, the value, where it came from, and the nearest valid key.
        MissingKeysError: if keys are missing, and nothing else is wrong.
    """
    values = composed.values
    mistakes: list[str] = []
    missing: list[str] = []
    typed: dict[str, Any] = {}
    for group, kind in groups.items():
        given = values.get(group) or {}
        try:
            typed[group] = _adapter(kind).validate_python(given, extra="forbid")
        except ValidationError as error:
            mistakes += _format_mistakes(error, composed, groups, group)
            missing += _missing_keys(error, group, given)
            model = next(settings_models(kind, given), BaseModel)
            typed[group] = model.model_construct(**given) if isinstance(given, dict) else model()
    try:
        config = RunConfig.model_validate({**values, **{group: {} for group in groups}})
    except ValidationError as error:
        mistakes += _format_mistakes(error, composed, groups)
    else:
        for name, schedule in config.schedules.items() if composed.is_new else ():
            # As one run of a sweep over warmup=0,100 does, whose other runs use `start`.
            switched_off = composed.origins.get(f"schedules.{name}.warmup", "").startswith("override ")
            if why := schedule.find_unused(switched_off):
                mistakes.append(f"schedules.{name}: {why} ({composed.origin(f'schedules.{name}')})")
    if len(missing) == len(mistakes) > 0:
        plain = {group: settings.model_dump(mode="json", warnings=False) for group, settings in typed.items()}
        raise MissingKeysError("\n".join(dict.fromkeys(mistakes)), {**config.model_dump(mode="json"), **plain}, missing)
    if mistakes:
        raise ConfigError("\n".join(dict.fromkeys(mistakes)))
    if not isinstance(typed["data"], Data):
        raise ConfigError(f"{config.recipe}: the task's Data type must extend unisono.Data")
    refuse_secrets({group: settings.model_dump() for group, settings in typed.items()})  # also those of secret types
    return config.model_copy(update=typed)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


# mistakes, in the user's words ------------------------------------------------------------------------------------


def _format_mistakes(
    error: ValidationError, composed: ComposedConfig, groups: Groups, group: str | None = None
) -> Iterator[str]:
    for mistake in error.errors():
        values = composed.values.get(group) if group else composed.values
        parts = [*([group] if group else []), *_strip_tags(mistake["loc"], values, mistake["type"])]
        dotted = ".".join(str(part) for part in parts)
        origin = composed.origin(dotted)
        if mistake["type"] == "extra_forbidden" and (why := _find_retirement(parts, composed.values, groups)):
            yield f"'{dotted}' is no longer a setting, got {mistake['input']!r} ({origin}). {why}"
        elif mistake["type"] == "extra_forbidden":
            yield f"unknown key '{dotted}' ({origin}), {_suggest_key(parts, composed.values, groups)}"
        elif mistake["type"] == "missing":
            kinds = parts[-1] == "kind" and ", ".join(_union_tags(parts[:-1], "kind", composed.values, groups))
            remedy = "" if any(isinstance(part, int) for part in parts) else f"; set {dotted}={kinds or '…'}"
            yield f"'{dotted}' is missing{_description(parts, composed.values, groups)}{remedy}"
        elif mistake["type"] in ("union_tag_not_found", "union_tag_invalid"):
            name = str(mistake["ctx"]["discriminator"]).strip("'")
            tags = ", ".join(_union_tags(parts, name, composed.values, groups))
            if "tag" in mistake["ctx"]:
                origin = composed.origin(f"{dotted}.{name}")
                given = mistake["ctx"]["tag"]
                why = why_not_offered(dotted, given)
                yield f"'{dotted}.{name}' must be one of: {tags}, got {given!r} ({origin}){why}"
            else:
                yield f"'{dotted}.{name}' is missing; choose one of: {tags}"
        elif mistake["type"] == "value_error":
            text = str(mistake["ctx"]["error"])  # ours names its keys itself; that of a task may not
            yield text if dotted in text else f"'{dotted}': {text}, got {mistake['input']!r} ({origin})"
        elif mistake["type"] in ("model_type", "dict_type", "model_attributes_type"):
            keys = ", ".join(f"{dotted}.{name}" for name in _children_at(parts, composed.values, groups))
            yield f"'{dotted}' is a group of keys, not a value ({origin})" + (f"; set one of {keys}" if keys else "")
        else:
            yield f"'{dotted}': {mistake['msg'][0].lower() + mistake['msg'][1:]}, got {mistake['input']!r} ({origin})"


def _find_retirement(parts: Sequence[int | str], values: Any, groups: Groups) -> str:
    """Why the key at a path was removed, as a sentence; empty if it never was a setting."""
    for model in settings_models(*_annotation_at(parts[:-1], values, groups)):
        if issubclass(model, Settings) and parts[-1] in model.retired:
            return model.retired[str(parts[-1])][1]
    return ""


def _missing_keys(error: ValidationError, group: str, values: Any) -> list[str]:
    """The dotted keys of a group that have no default and no value."""
    mistakes = [mistake for mistake in error.errors() if mistake["type"] == "missing"]
    return [".".join(map(str, (group, *_strip_tags(mistake["loc"], values, "missing")))) for mistake in mistakes]


def _description(parts: Sequence[int | str], values: Any, groups: Groups) -> str:
    """What the key at a path is, in brackets; empty where nothing says so."""
    for model in settings_models(*_annotation_at(parts[:-1], values, groups)):
        field = model.model_fields.get(str(parts[-1]))
        if field is not None and field.description:
            return f" ({field.description})"
    return ""


def _strip_tags(loc: Sequence[int | str], values: Any, error: str) -> list[int | str]:
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


def _suggest_key(parts: Sequence[int | str], values: Any, groups: Groups) -> str:
    """The same key elsewhere, else the nearest key here, else all keys here."""
    above = "".join(f"{part}." for part in parts[:-1])
    word = str(parts[-1])
    same = next(
        (key for key in _walk_keys(RunConfig, {}, groups) if key.endswith(f".{word}") and key != above + word), None
    )
    if same:
        return f"did you mean '{same}'?"
    hint = nearest(word, [str(name) for name in _children_at(parts[:-1], values, groups)])
    return hint.replace("'", f"'{above}", 1) if hint.startswith("did you mean") else hint


def _children_at(parts: Sequence[int | str], values: Any, groups: Groups) -> dict[Any, Any]:
    """Names and types of the keys below a path."""
    return _children(*_annotation_at(parts, values, groups), groups)


def _union_tags(parts: Sequence[int | str], name: str, values: Any, groups: Groups) -> list[str]:
    """The values that tell the branches of the union at a path from each other."""
    annotation, _ = _annotation_at(parts, values, groups)
    return [str(tag) for model in settings_models(annotation, None) for tag in _literal_values(model, name)]


def _annotation_at(parts: Sequence[int | str], values: Any, groups: Groups) -> tuple[Any, Any]:
    """The annotation at a path, and the value there if there is one."""
    annotation: Any = RunConfig
    for part in parts:
        annotation = _children(annotation, values, groups).get(part, Any)
        inside = dict(enumerate(values)) if isinstance(values, list) else values if isinstance(values, dict) else {}
        values = inside.get(part)
    return annotation, values


def _children(annotation: Any, values: Any, groups: Groups) -> dict[Any, Any]:
    """Names and types of the keys below an annotation; unions are resolved by the `kind` that is there."""
    for model in settings_models(annotation, values):
        fields = {name: field.annotation for name, field in model.model_fields.items()}
        if model is RunConfig:
            fields.update(groups)
        return fields
    if get_origin(annotation) is dict:
        return dict.fromkeys(values if isinstance(values, dict) else (), get_args(annotation)[1])
    if get_origin(annotation) is list and isinstance(values, list):
        return dict.fromkeys(range(len(values)), get_args(annotation)[0])
    return {}


def settings_models(annotation: Any, values: Any) -> Iterator[type[BaseModel]]:
    """The settings that an annotation allows; of a union those of the `kind` that the values have, if they have one."""
    if get_origin(annotation) is Annotated:
        yield from settings_models(get_args(annotation)[0], values)
    elif get_origin(annotation) in (Union, types.UnionType):
        branches = [model for branch in get_args(annotation) for model in settings_models(branch, values)]
        wanted = values.get("kind") if isinstance(values, dict) else None
        yield from (model for model in branches if wanted is None or wanted in _literal_values(model, "kind"))
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation


def _literal_values(model: type[BaseModel], name: str) -> tuple[Any, ...]:
    field = model.model_fields.get(name)
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def _walk_keys(annotation: Any, values: Any, groups: Groups, prefix: str = "") -> Iterator[str]:
    for name, child in _children(annotation, values, groups).items():
        dotted = f"{prefix}.{name}" if prefix else str(name)
        yield dotted
        yield from _walk_keys(child, {}, groups, dotted)


def refuse_secrets(values: Any) -> None:
    """Refuse nested configuration values that plainly hold a secret; the error does not repeat it.

    Raises:
        ConfigError: naming every key and the remedy.
    """
    if found := secrets.find(values):
        raise ConfigError(
            "a configuration is saved to files and sent to trackers, so it must not hold secrets: "
            f"{'; '.join(found)}. Let the task read it when it needs it, from an environment variable (os.environ) or "
            "from a file of yours (~/.netrc, a mounted secret)"
        )
