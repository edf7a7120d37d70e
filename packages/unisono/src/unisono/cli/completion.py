"""`unisono completion bash`: what a shell completes, verbs, recipes, runs, keys and values, with argcomplete.

The shell starts the command at every Tab, so nothing here imports torch, a recipe's task or a user's file: keys come
from the schema, from the YAML files of a recipe, and from reading (not running) a file with a task.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from unisono.cli import verbs as recipe_verbs
from unisono.config import CONFIG_FILE
from unisono.runtime.console import say

if TYPE_CHECKING:
    import ast

COMPLETION = "print what makes a shell complete verbs, recipes, runs and keys"
SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_ARGCOMPLETE"  # set by the shell's function while it asks


def add_verb(verbs: Any) -> None:
    """Put the verb among the others."""
    more = (
        '. For bash: eval "$(unisono completion bash)", best in ~/.bashrc; for zsh: eval "$(unisono completion zsh)" '
    )
    more += "in ~/.zshrc, after `autoload -Uz compinit && compinit`; for fish: unisono completion fish | source"
    verb = verbs.add_parser("completion", help=COMPLETION, description=f"{COMPLETION}{more}")
    verb.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    verb.set_defaults(run=_print_code)


def is_asked() -> bool:
    """Whether this process was started by a shell that wants to complete a command."""
    return _VARIABLE in os.environ


def asked_words() -> list[str]:
    """The words of the command that is being completed, after its name."""
    return os.environ.get("COMP_LINE", "").split()[1:]


def answer(parser: argparse.ArgumentParser, verbs: Any) -> None:
    """Answer the shell, and end the process.

    Args:
        parser: Of the whole command.
        verbs: Its collection of verbs, to which those of recipes are added.
    """
    from unisono.runtime.code.entry_points import import_extra

    argcomplete = import_extra("argcomplete", "completion", "shell completion")
    _add_recipe_verbs(verbs)
    for verb in verbs.choices.values():
        for action in verb._actions:
            if action.dest in _COMPLETERS and not hasattr(action, "completer"):
                action.completer = _COMPLETERS[action.dest]
    argcomplete.autocomplete(parser, always_complete_options=False)


def _print_code(parsed: argparse.Namespace) -> int:
    from unisono.runtime.code.entry_points import import_extra

    argcomplete = import_extra("argcomplete", "completion", "shell completion")
    say(argcomplete.shellcode(["unisono"], shell=parsed.shell), verbatim=True)
    return 0


def _add_recipe_verbs(verbs: Any) -> None:
    """Verbs of recipes, which the command itself finds by the run that they are given."""
    from unisono.config.code import recipes

    known = {name: text for recipe in recipes.all_recipes().values() for name, (_, text) in recipe.verbs.items()}
    known |= {name: text for name, (_, text) in recipe_verbs.DEFAULTS.items()}
    for name, text in known.items():
        if name not in verbs.choices:
            verb = verbs.add_parser(name, help=text)
            verb.add_argument("folder")
            verb.add_argument("overrides", nargs="*")


# what stands where ----------------------------------------------------------------------------------------------------


def complete_recipe(prefix: str, **_: Any) -> list[str]:
    """Recipes, files of code, and folders on the way to one."""
    from unisono.config.code import recipes

    return [*recipes.recipe_names(), *_list_entries(prefix, lambda path: path.suffix == ".py")]


def complete_run(prefix: str, **_: Any) -> list[str]:
    """Folders of runs, those in `runs` first, and folders on the way to one."""
    found = _list_entries(prefix, _is_run)
    return found if "/" in prefix else [*_list_entries("runs/", _is_run), *found]


def complete_fault(prefix: str, **_: Any) -> list[str]:
    """What `unisono explain` knows."""
    from unisono.proof.diagnoses.explain import list_faults

    return list_faults()


def complete_setting(prefix: str, parsed_args: argparse.Namespace, **others: Any) -> list[str]:
    """Keys; after `key=` the values that there are. Groups first, and the keys of one once its name is written."""
    key, equals, _ = prefix.partition("=")
    recipe = getattr(parsed_args, "recipe", None) or _recipe_of(getattr(parsed_args, "folder", None))
    known = _Settings(recipe, getattr(parsed_args, "config_dir", None))
    if equals:
        return [f"{key}={value}" for value in known.values(key)]
    keys = [f"{name}=" for name in known.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dictionary's
    depth = prefix.count(".") + 1
    groups = {f"{'.'.join(key.split('.')[:depth])}." for key in keys if key.count(".") >= depth}
    if len(groups) > 1:
        keys = [key for key in keys if key.count(".") < depth]
        return [*sorted(groups), *keys]
    return keys


_Completer = Callable[..., list[str]]
_COMPLETERS: dict[str, _Completer] = {
    "recipe": complete_recipe,
    "folder": complete_run,
    "paths": complete_run,
    "name": complete_fault,
    "overrides": complete_setting,
}


def _list_entries(prefix: str, is_wanted: Callable[[Path], bool]) -> list[str]:
    """What a path that is being written may become: entries that are wanted, and folders, with a slash."""
    folder, _, begun = prefix.rpartition("/")
    above = f"{folder}/" if "/" in prefix else ""
    try:
        entries = sorted(Path(above or ".").iterdir())
    except OSError:
        return []
    names = [path for path in entries if path.name.startswith(begun or "") and (begun or not path.name.startswith("."))]
    return [f"{above}{path.name}{'' if is_wanted(path) else '/'}" for path in names if is_wanted(path) or path.is_dir()]


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def _recipe_of(folder: Path | None) -> str | None:
    """The recipe or file that a run was made with, as its configuration names it."""
    from unisono.config import safe_yaml
    from unisono.runtime.errors import ConfigError

    if folder is None:
        return None
    try:
        return str(safe_yaml.read_yaml(Path(folder) / CONFIG_FILE).get("recipe"))
    except ConfigError:
        return None


# keys and values ------------------------------------------------------------------------------------------------------


class _Settings:
    """The keys that a recipe, or a file with a task, can be given.

    Args:
        recipe: Its name, or the file; None if unknown.
        own: The user's folder of YAML groups.
    """

    def __init__(self, recipe: str | None, own: Path | None) -> None:
        from unisono.config.code import recipes
        from unisono.config.compose import GROUPS_DIR

        self._recipe, self._folders = recipe or "", [GROUPS_DIR, *([own] if own else [])]
        folders = recipes.config_folders() if self._recipe in recipes.recipe_names() else {}
        if self._recipe in folders:
            self._folders.insert(0, folders[self._recipe])

    def keys(self) -> list[str]:
        """Dotted keys of values, and names of groups of which a file can be chosen."""
        return [*dict.fromkeys([*self._groups(), *self._typed(), *self._written(), *self._of_file()])]

    def values(self, key: str) -> list[str]:
        """The values that a key may take, as far as they can be listed."""
        chosen = {path.stem for folder in self._folders for path in (folder / key).glob("*.yaml")}
        if key == "run.name":
            return [path.name for path in sorted(Path("runs").glob("*")) if _is_run(path)]
        return sorted(chosen) + list(self._typed().get(key, ()))

    def _groups(self) -> list[str]:
        return sorted({path.parent.name for folder in self._folders for path in folder.glob("*/*.yaml")})

    def _typed(self) -> dict[str, list[str]]:
        """Keys that every run has, with their values where the schema lists them."""
        from unisono.config.schema.data import Data
        from unisono.config.schema.run import RunConfig
        from unisono.config.validate import TASK_GROUPS

        found: dict[str, list[str]] = {}
        for prefix, group in (("", RunConfig), ("data.", Data)):
            for key, values in _walk_fields(group, prefix):
                found[key] = [*dict.fromkeys([*found.get(key, ()), *values])]
        for name in ("recipe", "schedules", *TASK_GROUPS):  # the first word, and groups that are not values
            found.pop(name, None)
        return found

    def _written(self) -> list[str]:
        """Keys of a recipe's own groups, as its YAML files write them."""
        from unisono.config import safe_yaml
        from unisono.runtime.errors import ConfigError

        found = []
        for folder in self._folders:
            for path in [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]:
                group = "" if path.parent == folder else f"{path.parent.name}."
                if group == "" and path.stem not in (self._recipe, "task"):
                    continue
                try:
                    found += [f"{group}{key}" for key in _flatten(safe_yaml.read_yaml(path))]
                except ConfigError:
                    continue
        return [key for key in found if "." in key and not key.startswith(("defaults", "experiment."))]

    def _of_file(self) -> list[str]:
        """Settings of the tasks in a user's file, read from its text: running it would import what it imports."""
        place, _, named = self._recipe.partition(":")
        if not place.endswith(".py"):
            return []
        import ast

        from unisono.runtime.untrusted import safe_paths

        try:
            tree = ast.parse(safe_paths.read_regular(place))
        except (OSError, SyntaxError, ValueError):
            return []
        classes = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
        tasks = [classes[named]] if named in classes else classes.values()
        return [key for task in tasks for key in _declared_settings(task, classes)]


def _walk_fields(kind: Any, prefix: str) -> Iterator[tuple[str, list[str]]]:
    """The keys of a type of settings and of all that is in it, with the values that its type lists."""
    for name, field in kind.model_fields.items():
        inside = [one for one in _members(field.annotation) if hasattr(one, "model_fields")]
        if not inside or len(inside) < len(_members(field.annotation)):
            yield f"{prefix}{name}", _list_values(field.annotation)
        for one in inside:
            yield from _walk_fields(one, f"{prefix}{name}.")


def _members(annotation: Any) -> list[Any]:
    """The types of a union, however deep; of any other type, itself."""
    if get_origin(annotation) in (Literal, dict, list, tuple):
        return [annotation]
    arguments = [one for one in get_args(annotation) if isinstance(one, type) or get_origin(one) is not None]
    return [inner for one in arguments for inner in _members(one)] or [annotation]


def _list_values(annotation: Any) -> list[str]:
    values: list[str] = []
    for one in _members(annotation):
        if get_origin(one) is Literal:
            values += [str(value) for value in get_args(one)]
        elif one is bool:
            values += ["true", "false"]
        elif one is type(None):
            values.append("null")
    return values


def _flatten(values: Any, prefix: str = "") -> Iterator[str]:
    for name, value in values.items() if isinstance(values, dict) else ():
        key = f"{prefix}{name}".removeprefix("/")
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{key}.")
        else:
            yield key


def _declared_settings(task: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterable[str]:
    """The keys of a task's classes `Config`, `Model` and `Data`, nested in it or assigned from the file."""
    import ast

    from unisono.config.validate import TASK_GROUPS

    for statement in task.body:
        for group, attribute in TASK_GROUPS.items():
            if isinstance(statement, ast.ClassDef) and statement.name == attribute:
                declared: ast.ClassDef | None = statement
            elif isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == attribute for target in statement.targets
            ):
                value = statement.value
                declared = classes.get(value.id) if isinstance(value, ast.Name) else None
            else:
                continue
            for line in declared.body if declared is not None else ():
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield f"{group}.{line.target.id}"
