"""The page of every setting, from the schema: key, type, default, meaning, and the modules that read it.

Who reads a key is found in the source: an attribute of its name, of a variable that is named or annotated as its group.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from unisono.config.schema import data, optimizers, run, schedules, verbs

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted(ROOT.glob("packages/*/src")), *sorted(ROOT.glob("recipes/*/src"))]
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
VERBS = {
    "Prepare": "unisono data prepare",
    "Reshard": "unisono data reshard",
    "Preview": "unisono data preview",
    "Export": "unisono export",
    "Import": "unisono import",
}


HEAD = """# All settings

Every key of a run, from the schema of this version. Write them as `key=value` behind a command, or in YAML
([Configuration](configuration.md)); `unisono config RECIPE` prints them with their values and where each comes from.
*Read by* names the parts of `unisono` that act on a key: its top-level folders, or one of its engines. What a recipe
adds (`task.*`, `model.*`, `data.*`) is listed by `unisono config RECIPE`.

<div class="settings" markdown>
"""


class Group(NamedTuple):
    """Keys that stand together: `prefix` + a field of `model`."""

    prefix: str
    model: type[BaseModel]
    title: str


def groups() -> Iterator[Group]:
    """All groups of a run, each before the groups that its keys lead to."""
    yield Group("", run.RunConfig, "Top level")
    for name, field in run.RunConfig.model_fields.items():
        if name == "data":
            yield from _below("data.", data.Data, "data")
        elif name == "schedules":
            yield from _unions("schedules.NAME.", schedules.Schedule, "schedules.NAME")
        elif name == "optim":
            yield from _unions("optim.", optimizers.Optimizer, "optim")
        else:
            for model in models_of(field.annotation):
                yield from _below(f"{name}.", model, name)


def _unions(prefix: str, union: Any, title: str) -> Iterator[Group]:
    """Of a choice by `kind`: what all members have, then what each has."""
    members = models_of(union)
    common = next(base for base in members[0].__mro__[1:] if all(issubclass(member, base) for member in members))
    yield from _below(prefix, common, title, skip=("kind",))
    for member in members:
        kind = typing.get_args(member.model_fields["kind"].annotation)[0]
        yield Group(prefix, member, f"{title}: kind={kind}")


def _below(prefix: str, model: type[BaseModel], title: str, skip: tuple[str, ...] = ()) -> Iterator[Group]:
    yield Group(prefix, model, title)
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        for inner in models_of(field.annotation):
            listed = typing.get_origin(_no_none(field.annotation)) is list
            yield from _below(f"{prefix}{name}{'[]' if listed else ''}.", inner, f"{prefix}{name}")


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The groups that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_of(part)]


def fields_of(group: Group) -> dict[str, FieldInfo]:
    """The keys that a group's table lists: of a kind, only what the common table does not say."""
    fields = group.model.model_fields
    if ": kind=" not in group.title:
        return {name: field for name, field in fields.items() if name != "kind"}
    common = {
        name: field for base in group.model.__mro__[1:] for name, field in getattr(base, "model_fields", {}).items()
    }
    return {
        name: field
        for name, field in fields.items()
        if name != "kind" and (name not in common or field.default != common[name].default)
    }


def write_type(annotation: Any) -> str:
    """As a user writes values: `number`, `whole number`, `a | b`, `list of …`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin is typing.Annotated:
        return f"{write_type(arguments[0])}{_write_limits(arguments[1:])}"
    if origin is list:
        return f"list of {write_type(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(write_type(item) for item in arguments)}]"
    if origin is dict:
        return f"mapping of {write_type(arguments[1])}"
    if arguments:
        return " | ".join(write_type(item) for item in arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        kind = annotation.model_fields.get("kind")
        values = typing.get_args(kind.annotation) if kind else ()
        return f"kind={values[0]}" if values else "group"
    plain = {int: "integer", float: "number", bool: "true | false", str: "text", Path: "path", Any: "the task's"}
    return plain.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _write_limits(metadata: Sequence[Any]) -> str:
    limits = {
        name: getattr(part, name) for item in metadata for part in _parts(item) for name in SIGNS if hasattr(part, name)
    }
    if {"ge", "le"} <= limits.keys():
        return f" from {limits['ge']:g} to {limits['le']:g}"
    return " and".join(f" {sign} {_round(limits[name])}" for name, sign in SIGNS.items() if name in limits)


def _parts(item: Any) -> Sequence[Any]:
    return item.metadata if isinstance(item, FieldInfo) else [item]


def _round(limit: float) -> str:
    return "2³¹" if limit == 2**31 else f"{limit:g}"


def write_default(field: FieldInfo) -> str:
    """As it would be written on the command line."""
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "–"
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (tuple, list)):
        return f"`[{', '.join('null' if item is None else str(item) for item in value)}]`"
    return f"`{value}`"


def _no_none(annotation: Any) -> Any:
    parts = [part for part in typing.get_args(annotation) if part is not type(None)]
    return parts[0] if len(parts) == 1 and typing.get_origin(annotation) is not list else annotation


@cache
def _reads() -> dict[str, list[tuple[str, frozenset[str]]]]:
    """For each attribute that source reads: the module, and the names and types of what it is an attribute of."""
    found: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
            if name.startswith("unisono.config.schema"):
                continue
            tree = ast.parse(path.read_text("utf-8"))
            types: dict[str, set[str]] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.arg) and node.annotation is not None:
                    types.setdefault(node.arg, set()).update(re.findall(r"\w+", ast.unparse(node.annotation)))
                elif isinstance(node, ast.AnnAssign):
                    last = _last(node.target)
                    types.setdefault(last, set()).update(re.findall(r"\w+", ast.unparse(node.annotation)))
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    last = _last(node.value)
                    found.setdefault(node.attr, []).append((name, frozenset({last, *types.get(last, ())})))
    return found


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def readers(group: Group, name: str) -> list[str]:
    """The modules that read a key; of one that is handed on with its group, those that read the group."""
    types = {base.__name__ for base in group.model.__mro__ if issubclass(base, BaseModel)} - {"BaseModel", "Settings"}
    last = group.prefix.rstrip(".").removesuffix("[]").rpartition(".")[2]
    words = types | {last or "config", last.rstrip("s")}
    modules = {module for module, of in _reads().get(name, ()) if words & of}
    around = {module for module, _ in _reads().get(last, ())}
    modules = modules or {module for module, _ in _reads().get(name, ())} & around or around
    return sorted({_short(module) for module in modules})


def _short(module: str) -> str:
    """A module's floor; of `unisono.engines.torch.parallel.wrap`, `engines.torch`; of a recipe's, its package."""
    package, *inner = module.split(".")
    return ".".join(inner[: 2 if inner[:1] == ["engines"] else 1]) if package == "unisono" else package


def write_page() -> str:
    """The page of all settings."""
    text = HEAD
    for title, listed in itertools.groupby(groups(), lambda group: group.title):
        text += f"\n## {title}\n\n"
        for group in listed:
            text += (
                f"{inspect.cleandoc(group.model.__doc__ or '').partition(chr(10) * 2)[0]}\n\n{_write_table(group)}\n"
            )
    text += "\n## Words of verbs\n\nThese are no settings of a run; they follow the verb in the same way.\n"
    for name, verb in VERBS.items():
        text += f"\n### `{verb}`\n\n{_write_table(Group('', getattr(verbs, name), verb), read=False)}\n"
    return f"{text}\n</div>\n"


def _write_table(group: Group, read: bool = True) -> str:
    rows = []
    for name, field in fields_of(group).items():
        whole = typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        if group.prefix == "" and read and models_of(field.annotation) and name != "adapter":
            continue  # a group, which has its own table
        used = f"<small>read by {', '.join(readers(group, name))}</small>" if read else ""
        meaning = "<br>".join(filter(None, [field.description, used]))
        rows.append([f"`{group.prefix}{name}`", write_type(whole), write_default(field), meaning])
    head = ["key", "type", "default", "meaning"]
    lines = [head, ["---"] * len(head), *rows] if rows else []
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)
