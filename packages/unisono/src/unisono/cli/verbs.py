"""Verbs of recipes and of users' files: plain functions whose parameters are the arguments of the command.

    unisono VERB RUN [WORD …] [key=value …]

The verb is followed by a run, or by a task without a run (a recipe, or `path/to/file.py:Class`), which determines whose
verb is meant. A recipe lists its verbs in `RECIPE`, a user's file in `VERBS = {"listen": listen}`. Parameters of the
function without a default are positional arguments, the others are `key=value`; values are converted to the annotated
types. A parameter called `run` receives the opened run; then `key=value` arguments that are no parameters override
settings of the run. A parameter called `overrides` receives them as they are, for a verb that starts runs. What the
function returns or yields is printed line by line.

`--task FILE.py:CLASS` and `--trust` control which code a run may import, as for the built-in verbs on runs.
"""

from __future__ import annotations

import argparse
import os
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments
from unisono.config import CONFIG_FILE
from unisono.runtime.collector import paused_collector
from unisono.runtime.console import say
from unisono.runtime.display.preparing import preparing
from unisono.runtime.errors import ConfigError, nearest

if TYPE_CHECKING:
    import inspect

DEFAULTS = {"predict": ("unisono.launch.trained.predict:predict", "write predictions of a trained model as a table")}
_HELP = ("-h", "--help")


def list_verbs() -> str:
    """List the recipes and their verbs for `unisono --help`, without importing their tasks."""
    from unisono.config.code import recipes

    lines = ["recipes and their verbs (see unisono VERB RUN --help):"]
    lines += [f"  {verb:<10} {'every task':<12} {text}" for verb, (_, text) in DEFAULTS.items()]
    found = recipes.all_recipes()
    for name in recipes.recipe_names():
        if name not in found:
            lines.append(f"  {'':<10} {name:<12} cannot be imported")
        elif not found[name].verbs:
            lines.append(f"  {'—':<10} {name:<12} none of its own")
        for verb, (_, text) in found[name].verbs.items() if name in found else ():
            lines.append(f"  {verb:<10} {name:<12} {text}")
    return "\n".join(lines)


def replaces_core(words: Sequence[str]) -> bool:
    """Whether a run's recipe has its own `export`, which takes precedence; `to=FORM` selects the built-in one."""
    if words[0] != "export" or any(word.startswith("to=") for word in words):
        return False
    from unisono.config import safe_yaml
    from unisono.config.code import recipes

    # A word may be too long for a file name, for which `Path.is_file` raises an error.
    config = CONFIG_FILE
    run = next((Path(word) for word in words[1:] if os.path.isfile(Path(word, config))), None)  # noqa: PTH113
    if run is None:
        return False
    try:
        reference = str(safe_yaml.read_yaml(run / CONFIG_FILE).get("recipe"))
    except ConfigError:
        return False  # the verb reports what is wrong with it
    name = recipes.find_recipe_name(reference)
    return name is not None and "export" in recipes.find_recipe(name).verbs


def main(argv: Sequence[str], core: Collection[str] = ()) -> int:
    """Run a verb that is not built in; return the exit code.

    Args:
        argv: The words of the command.
        core: Names of the built-in verbs, for errors.

    Raises:
        ConfigError: For an unknown verb, or invalid arguments.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    arguments.add_task_options(parser)
    parsed, words = parser.parse_known_args(argv[1:])
    verb = argv[0]
    given = [word for word in words if word not in _HELP]
    if not given:
        having = [(name, found, _target_word(found)) for name, found in _find_in_recipes(verb, core)]
        say("\n\n".join(f"{_help(verb, target, found)}\n\nfor: {name}" for name, found, target in having))
        if len(given) < len(words):
            return 0
        target = having[0][2]
        raise ConfigError(f"unisono {verb} needs a {target.lower()}: unisono {verb} {target}")
    try:
        with preparing(f"opening {given[0]}"), paused_collector():
            reference = _reference(given[0], parsed.task, parsed.trust)
            function = _find(verb, reference, core)
    except ConfigError:
        _refuse_misspelt(verb, core)  # the likelier mistake, whatever the word after it is
        raise
    if len(given) < len(words):
        say(_help(verb, given[0], function))
        return 0
    _print(_call_verb(verb, function, given[0], given[1:], reference))
    return 0


def _reference(target: str, task: str | None, trust: bool) -> str:
    """Return the task that a command is about: that of a run, if it may be imported, or the one named directly."""
    from unisono.config.code import foreign_run, recipes, references

    if (Path(target) / CONFIG_FILE).is_file():
        return foreign_run.resolve_task(Path(target), task, trust=trust)
    if (found := recipes.find_folder_recipe(Path(target))) is not None:
        return found[0]
    if task is not None or trust:
        raise ConfigError(
            f"{target} is not a run (no {target}/{CONFIG_FILE}); --task and --trust are about a run's task"
        )
    if references.names_code(target) or target in recipes.recipe_names():
        return target
    raise ConfigError(
        f"{target} is neither a run (no {target}/{CONFIG_FILE}), nor a model that a recipe opens (by its config.json), "
        f"nor a task; {recipes.suggest_recipe(target)}"
    )


def _find(verb: str, reference: str, core: Collection[str]) -> Callable[..., Any]:
    verbs = {**DEFAULTS, **_verbs_of(reference)}
    if verb not in verbs:
        raise ConfigError(f"{reference} has no verb '{verb}', {_suggest(verb, [*verbs], core)}")
    found = verbs[verb]
    return _import_function(found[0]) if isinstance(found, tuple) else found


def _verbs_of(reference: str) -> Mapping[str, Any]:
    from unisono.config.code import recipes, references

    name = recipes.find_recipe_name(reference)
    if name is not None:
        return recipes.find_recipe(name).verbs
    place = reference if reference.endswith(".py") else reference.rpartition(":")[0]
    module = references.load_module(reference, place)
    verbs = getattr(module, "VERBS", {})
    if not isinstance(verbs, Mapping) or not all(callable(function) for function in verbs.values()):
        raise ConfigError(f"{reference}: VERBS must be a dictionary from the names of verbs to functions")
    return verbs


def _find_in_recipes(verb: str, core: Collection[str]) -> list[tuple[str, Callable[..., Any]]]:
    from unisono.config.code import recipes

    known = {name: recipe.verbs for name, recipe in recipes.all_recipes().items()}
    having = [(name, _import_function(verbs[verb][0])) for name, verbs in known.items() if verb in verbs]
    if verb in DEFAULTS:
        having.insert(0, ("every other task", _import_function(DEFAULTS[verb][0])))
    if not having:
        names = [*DEFAULTS, *(verb for verbs in known.values() for verb in verbs)]
        raise ConfigError(f"unknown verb '{verb}', {_suggest(verb, names, core)}")
    return having


def _refuse_misspelt(verb: str, core: Collection[str]) -> None:
    """Refuse a word that is nearly a verb, and none of any recipe."""
    from unisono.config.code import recipes

    own = {*DEFAULTS, *(name for recipe in recipes.all_recipes().values() for name in recipe.verbs)}
    hint = nearest(verb, [*own, *core])
    if verb not in own and hint.startswith("did you mean"):
        raise ConfigError(f"unknown verb '{verb}', {hint}")


def _suggest(verb: str, own: Collection[str], core: Collection[str]) -> str:
    """Suggest the nearest verb; if none is near, list those of the task, since the help lists the built-in ones."""
    hint = nearest(verb, [*own, *core])
    return hint if hint.startswith("did you mean") else f"{nearest(verb, own)}; unisono --help lists the built-in ones"


def _import_function(reference: str) -> Callable[..., Any]:
    from unisono.config.code import references

    module, _, name = reference.rpartition(":")
    function: Callable[..., Any] = getattr(references.load_module(f"the verb {reference}", module), name)
    return function


def _call_verb(verb: str, function: Callable[..., Any], target: str, words: list[str], reference: str) -> Any:
    """Call a function with the arguments of a command, and with the opened run, whose task is `reference`."""
    import inspect

    from unisono.launch.trained.run import open_run

    parameters = dict(inspect.signature(function).parameters)
    has_run = parameters.pop("run", None) is not None
    starts_runs = parameters.pop("overrides", None) is not None
    needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if len(words) < len(needed):
        raise ConfigError(f"{verb} needs {' '.join(name.upper() for name in needed)}: {_usage(verb, target, function)}")
    given: dict[str, Any] = dict(zip(needed, words, strict=False))
    overrides: list[str] = []
    for word in words[len(needed) :]:
        name, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"'{word}': write key=value. {_usage(verb, target, function)}")
        if name in parameters:
            given[name] = text
        elif starts_runs or (has_run and ("." in name or name in ("data", "task", "model"))):
            overrides.append(word)
        else:
            raise ConfigError(f"unknown word '{word}', {nearest(name, parameters)}")
    values = {name: _parse_value(function, name, parameters[name], text) for name, text in given.items()}
    if has_run and not Path(target).is_dir():
        raise ConfigError(f"{verb} needs the folder of a run: {_usage(verb, 'RUN', function)}")
    if starts_runs:
        values["overrides"] = overrides
    if not has_run:
        return function(**values)
    with preparing(f"opening {target}"), paused_collector():
        opened = open_run(target, overrides, task=reference)
    return function(run=opened, **values)


def _parse_value(function: Callable[..., Any], name: str, parameter: inspect.Parameter, text: str) -> Any:
    import yaml
    from pydantic import TypeAdapter, ValidationError

    kind = parameter.annotation
    if isinstance(kind, str):
        kind = eval(kind, {**vars(typing), **getattr(function, "__globals__", {})})
    for read in (str, _parse_yaml):
        try:
            return TypeAdapter(Any if kind is parameter.empty else kind).validate_python(read(text))
        except ValidationError as error:
            fault = error.errors()[0]["msg"]
        except yaml.YAMLError:
            continue  # a text that is no YAML, such as @FILE
    raise ConfigError(f"{name}={text}: {fault[0].lower()}{fault[1:]}")


def _parse_yaml(text: str) -> Any:
    import yaml

    return None if text == "null" else yaml.safe_load(text)


def _target_word(function: Callable[..., Any]) -> str:
    """Return what a verb is about, as its usage has it: a recipe if it starts runs of its own, else a run."""
    import inspect

    return "RECIPE" if "overrides" in inspect.signature(function).parameters else "RUN"


def _usage(verb: str, target: str, function: Callable[..., Any]) -> str:
    import inspect

    taken = inspect.signature(function).parameters
    parameters = [p for name, p in taken.items() if name not in ("run", "overrides")]
    needed = [p.name.upper() for p in parameters if p.default is p.empty]
    defaults = {p.name: "…" if p.default is None else p.default for p in parameters if p.default is not p.empty}
    optional = [
        f"[{name}={str(value).lower() if value in (True, False) else value}]" for name, value in defaults.items()
    ]
    settings = ["[SETTING=…]"] if "overrides" in taken else []
    return " ".join(["unisono", verb, target, *needed, *optional, *settings])


def _help(verb: str, target: str, function: Callable[..., Any]) -> str:
    """Return the usage, followed by the function's docstring and its description of the arguments."""
    import inspect

    text = inspect.getdoc(function) or ""
    described, _, rest = text.partition("\nArgs:\n")
    arguments = re.split(r"\n\S", rest)[0]
    lines = [line for line in arguments.splitlines() if not line.strip().startswith(("run:", "overrides:"))]
    shown = "\n".join(f"  {line.strip()}" if line.startswith("    ") else line for line in lines)
    parts = (f"usage: {_usage(verb, target, function)}", described.strip(), shown)
    return "\n\n".join(part for part in parts if part)


def _print(result: Any) -> None:
    if result is None:
        return
    if isinstance(result, Mapping):
        result = [f"{name}: {value}" for name, value in result.items()]
    for line in [result] if isinstance(result, str | Path) or not isinstance(result, Iterable) else result:
        say(line, verbatim=True)  # it may be anything, e.g. a text that a model wrote
