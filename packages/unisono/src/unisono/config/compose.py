"""From YAML groups and `key=value` overrides to one dictionary that knows where every value comes from.

Hydra composes (defaults lists, `group=choice`); it is not used to instantiate anything, and keys such as `_target_` are
refused. Values (`key=value`) are put in afterwards: unknown keys too, because they are the schema's to refuse, which
knows all names and can suggest the nearest; and a dictionary that says its `kind` replaces what was there, where Hydra
would mix the keys of two kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from unisono.config import interpolation, precedence, safe_yaml
from unisono.config.code import recipes, references
from unisono.config.schema import store_options
from unisono.config.schema.optimizers import why_not_offered
from unisono.runtime import secrets
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, nearest

GROUPS_DIR = Path(__file__).parent / "groups"


@dataclass(frozen=True)
class ComposedConfig:
    """A composed configuration, not yet validated.

    Attributes:
        values: nested dictionary of plain values.
        origins: dotted key of every value that was written somewhere -> `file.yaml:line` or `override 'key=value'`.
        is_new: whether it is composed for a run that does not exist yet, of which more is asked.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    is_new: bool = False

    def origin(self, dotted: str) -> str:
        """Where a key comes from: itself, else the nearest written key above it, else the schema's default."""
        above = dotted
        while above:
            if above in self.origins:
                return self.origins[above]
            above = above.rpartition(".")[0]
        below = (origin for key, origin in self.origins.items() if key.startswith(f"{dotted}."))
        return next(below, "default")

    def explain(self, message: str) -> str:
        """A message with the origin of every key that it names and that somebody wrote."""
        said = message.partition("\n  unisono ")[0]  # a command that it proposes repeats the keys of the user's own
        named = dict.fromkeys(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", said))
        origins = {key: secrets.mask(self.origins[key]) for key in named if key in self.origins}
        origins = {key: origin for key, origin in origins.items() if not _is_private(key)}
        lines = [f"  {key} is from {origin}" for key, origin in origins.items() if f"({origin})" not in message]
        return "\n".join([message, *lines])


def compose(
    recipe: str,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> ComposedConfig:
    """Compose a recipe, a task of the user's own (`path/to/file.py:Class`) or a config of the user's own folder.

    Args:
        recipe: a packaged recipe, `file.py:Class`, `file.py` with one task in it, `package.module:Class`, or the name
            of a YAML file in `config_dir`.
        overrides: `group=choice` and `key=value`, in Hydra's grammar.
        config_dir: folder with the user's own groups and configs.
        settings: of a task object, by group: they stand in place of what the files say of these groups, unless an
            override chooses another file; keys that an override names are changed in them.

    Raises:
        ConfigError: naming the override, file or key and the nearest valid one.
    """
    return Composer(recipe, config_dir).compose(overrides, settings)


class Composer:
    """Composes one recipe many times, as a sweep does: its files are read once for each choice of groups.

    Raises:
        ConfigError: if there is no such recipe or folder.
    """

    def __init__(self, recipe: str, config_dir: Path | None = None) -> None:
        self._recipe = recipe
        self._primary, self._folders = _search_path(recipe, config_dir)
        self._groups: dict[tuple[str, ...], _Groups] = {}
        self._overrides: dict[str, _Override] = {}  # as read: a sweep has the same few words in most of its runs

    def choices(self, group: str) -> list[str]:
        """The names that `group=…` may choose; empty if it is not a group."""
        return _group_choices(group, self._folders)

    def compose(
        self, overrides: Sequence[str] = (), settings: Mapping[str, Mapping[str, Any]] | None = None
    ) -> ComposedConfig:
        """Compose it once; see the function `compose`."""
        for override in overrides:  # before Hydra sees them: its message for a forgotten '=' does not help
            if not (re.match(r"\+*[^=+]", override) and "=" in override) and not override.startswith("~"):
                file = "; to train what NAME.yaml says: unisono train NAME --config-dir FOLDER" * override.endswith(
                    (".yaml", ".yml")
                )
                raise ConfigError(
                    f"{_override_key(override)} is not an override: write key=value or group=choice{file}"
                )
        for override in overrides:
            if override not in self._overrides:
                self._overrides[override] = _parse_override(override, self._folders)
        read = [self._overrides[override] for override in overrides]
        chosen = {given.key for given in read if given.is_choice}
        kept = {group: dict(values) for group, values in (settings or {}).items() if group not in chosen}
        choices = tuple(given.text for given in read if given.is_choice)
        if choices not in self._groups:
            self._groups[choices] = _read_groups(self._primary, self._folders, [g for g in read if g.is_choice])
        groups = self._groups[choices]
        values = groups.with_values([given for given in read if not given.is_choice], kept)
        origins = dict(groups.origins)
        for group in kept:
            _drop_origins_below(origins, group)
            origins[group] = "the task object"
        for given in read:
            for dotted in given.replaces:
                _drop_origins_below(origins, dotted)
                origins.pop(dotted, None)
            for dotted in given.sets:
                _drop_origins_below(origins, dotted)
                origins[dotted] = f"override '{given.text}'"
        if references.names_code(self._recipe):
            values["recipe"] = self._recipe
            origins["recipe"] = "command line"
        written = {key for key, origin in origins.items() if groups.packaged.get(key) != origin}
        for key, value, other in list(precedence.yielding_defaults(values, written)):
            group, _, name = key.partition(".")
            values[group] = {**(values.get(group) or {}), name: value}
            origins[key] = f"default, which yields to {other}"
        composed = ComposedConfig(values, origins, is_new=True)
        _refuse_instantiation(values, composed)
        return composed


def apply_overrides(composed: ComposedConfig, overrides: Sequence[str], folders: Sequence[Path] = ()) -> ComposedConfig:
    """Composed values, such as those of a run, with some of them replaced.

    Args:
        composed: what there is.
        overrides: `key=value` and `group=choice`, as for `compose`.
        folders: of YAML groups that may be chosen.

    Raises:
        ConfigError: naming the override that cannot be read.
    """
    values, origins = deepcopy(composed.values), dict(composed.origins)
    for override in overrides:
        given = _parse_override(override, list(folders))
        *above, last = given.key.replace("/", ".").split(".")
        inside = values
        for name in above:
            inside = inside.setdefault(name, {})
            if not isinstance(inside, dict):
                raise ConfigError(f"override '{override}': '{name}' is a value, not a group of keys")
        new = given.value
        if given.is_choice:
            new = safe_yaml.read_yaml(
                next(f for folder in folders if (f := folder / given.key / f"{new}.yaml").is_file())
            )
        merged = isinstance(new, dict) and isinstance(inside.get(last), dict) and not given.replaces
        inside[last] = {**inside[last], **new} if merged else new
        origins[given.key] = f"override '{override}'"
    return replace(composed, values=values, origins=origins)


def _search_path(recipe: str, config_dir: Path | None) -> tuple[str, list[Path]]:
    """The primary config and the folders to search, the one that holds it first."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir}: no such folder")
    own = [config_dir.resolve()] if config_dir else []
    if config_dir is not None and next(config_dir.rglob("*.yaml"), None) is None:
        other = " (files named .yml are not read)" if next(config_dir.rglob("*.yml"), None) is not None else ""
        say(
            f"unisono: WARNING: --config-dir {config_dir} holds no .yaml file{other}, so it changes nothing", error=True
        )
    for folder in own:
        for path in sorted(folder.rglob("*.yaml")):
            safe_yaml.check_yaml(path)
    if references.names_code(recipe):
        _refuse_shadows(own, [GROUPS_DIR])
        return "task", [GROUPS_DIR, *own]
    packaged = recipes.config_folders()
    if own and (own[0] / f"{recipe}.yaml").is_file():
        if recipe in packaged:
            raise ConfigError(f"{own[0] / recipe}.yaml has the name of a packaged recipe; give it another name")
        _refuse_shadows(own, [GROUPS_DIR, *packaged.values()])
        return recipe, [*own, *packaged.values(), GROUPS_DIR]
    if recipe in packaged:
        _refuse_shadows(own, [GROUPS_DIR, packaged[recipe]])
        return recipe, [packaged[recipe], GROUPS_DIR, *own]
    if recipe in recipes.recipe_names():
        recipes.find_recipe(recipe)  # which says why it cannot be imported
        raise ConfigError(f"recipe '{recipe}' has no {recipes.config_folder(recipe) / recipe}.yaml")
    if own:
        known = [*packaged, *(path.stem for folder in own for path in folder.glob("*.yaml"))]
        raise ConfigError(f"unknown recipe '{recipe}', {nearest(recipe, known)}")
    raise ConfigError(f"unknown recipe '{recipe}', {recipes.suggest_recipe(recipe)}")


def _refuse_shadows(own: Sequence[Path], packaged: Sequence[Path]) -> None:
    for mine in own:
        for path in sorted(mine.rglob("*.yaml")):
            if any((folder / path.relative_to(mine)).is_file() for folder in packaged):
                raise ConfigError(f"{path} has the name of a packaged file, which it would hide; rename it")


@dataclass(frozen=True)
class _Override:
    """One override, read: a choice, which is Hydra's, or a value."""

    text: str
    key: str
    value: Any
    is_choice: bool

    @property
    def sets(self) -> list[str]:
        """Dotted keys of all values in it."""
        parts = [] if self.is_choice else _walk_values(self.key, self.value)
        return [key for key, value in parts if not (isinstance(value, dict) and value)]

    @property
    def replaces(self) -> list[str]:
        """Dotted keys of the dictionaries that say their `kind`, whatever was there, and what `key={}` empties."""
        parts = [] if self.is_choice else _walk_values(self.key, self.value)
        found = [key for key, value in parts if isinstance(value, dict) and "kind" in value]
        return [*found, self.key] if self.value == {} and "." in self.key else found


def _walk_values(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value and everything in its dictionaries, from the outside to the inside."""
    yield key, value
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _walk_values(f"{key}.{name}", inner)


@dataclass(frozen=True)
class _Groups:
    """What the files say, before values are put in.

    Attributes:
        config: of OmegaConf, whose references are not resolved yet.
        origins: dotted key of every value in the files -> `file.yaml:line`.
        packaged: those of them that a packaged file has written last, so that they are our defaults.
    """

    config: Any
    origins: dict[str, str]
    packaged: dict[str, str]

    def with_values(self, overrides: list[_Override], settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The composed values, with those of overrides and of a task object."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        config = deepcopy(self.config)
        with interpolation.limit_references():
            try:
                for group, given in settings.items():
                    OmegaConf.update(config, group, _escape_values(given), merge=False, force_add=True)
                for override in overrides:
                    for key in override.replaces:
                        OmegaConf.update(config, key, {}, merge=False, force_add=True)
                    OmegaConf.update(config, override.key, override.value, merge=True, force_add=True)
                values = OmegaConf.to_container(config, resolve=True)
            except (OmegaConfBaseException, ValueError, RecursionError) as error:
                raise ConfigError(_summarise_error(str(error))) from error
        assert isinstance(values, dict)
        return {str(name): value for name, value in values.items()}


def _read_groups(primary: str, folders: list[Path], choices: list[_Override]) -> _Groups:
    """Read the files that a recipe and the choices of a command name, in Hydra's order."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    with interpolation.limit_references(), initialize_config_dir(str(folders[0]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        search = f"hydra.searchpath=[{','.join(repr('file://' + str(folder)) for folder in folders[1:])}]"
        try:
            listed = loader.compute_defaults_list(primary, [search], RunMode.RUN)
            known = listed.overrides.known_choices
            chosen = [f"{'' if o.key in known else '+'}{o.text.lstrip('+')}" for o in choices]
            config = hydra_compose(primary, overrides=[search, *chosen])
            if chosen:
                listed = loader.compute_defaults_list(primary, [search, *chosen], RunMode.RUN)
        except AssertionError as error:  # Hydra's, of entries that no configuration should have
            raise ConfigError("the list `defaults` cannot be read; write its entries as `group: choice`") from error
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
            raise ConfigError(_summarise_error(str(error))) from error
    origins: dict[str, str] = {}
    packaged: dict[str, str] = {}
    ours = [GROUPS_DIR, *recipes.config_folders().values()]
    for default in listed.defaults:
        path = next((f for folder in folders if (f := folder / f"{default.config_path}.yaml").is_file()), None)
        if path is None or (default.package or "").startswith("hydra"):
            continue
        for dotted, line in _key_lines(path):
            full = f"{default.package}.{dotted}" if default.package else dotted
            _drop_origins_below(origins, full)
            origins[full] = f"{_display_path(path)}:{line}"
            if any(path.is_relative_to(folder) for folder in ours):
                packaged[full] = origins[full]
    return _Groups(config, origins, packaged)


def _escape_values(value: Any) -> Any:
    """A value whose texts refer to no other keys."""
    if isinstance(value, dict):
        return {name: _escape_values(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_escape_values(inner) for inner in value]
    return escape_interpolation(value) if isinstance(value, str) else value


def escape_interpolation(text: str) -> str:
    """A text in which nothing refers to other keys, as `${seed}` would."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _parse_override(override: str, folders: list[Path]) -> _Override:
    """An override in Hydra's grammar, unless it asks for what is not done here."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType

    # An IPv6 address and a port, `[fd00::1]:29400`, is a text: Hydra begins to read a list, and fails at its end.
    quoted = re.sub(r"=(\[[^\[\],]+\]:\d+)$", r"='\1'", override)
    try:
        parsed = OverridesParser.create().parse_override(quoted)
    except Exception as error:
        raise ConfigError(
            f"override {_override_key(override)} cannot be read: its value is not in Hydra's grammar. Quote values "
            "with special characters: key='\"a, b\"'"
        ) from error
    if parsed.is_sweep_override():
        raise ConfigError(f"override '{override}' has several values; for a list write key=[a,b]")
    name = parsed.key_or_group
    if re.split(r"[./]", name)[0] == "hydra":
        raise ConfigError(f"unknown key '{name}' (override '{override}'): Hydra's own settings have no effect here")
    choices = _group_choices(name, folders)
    if choices and (parsed.type == OverrideType.DEL or parsed.value() is None):
        raise ConfigError(f"override '{override}': '{name}' is a group, choose one of {', '.join(choices)}")
    if parsed.type == OverrideType.DEL:
        raise ConfigError(f"override '{override}': keys cannot be removed; set {name}=null instead")
    if parsed.package is not None and not choices:
        raise ConfigError(
            f"override '{override}': '{name}' is not a group, so it cannot be placed under {parsed.package}"
        )
    is_choice = bool(choices) and isinstance(parsed.value(), str)
    if is_choice and parsed.value() not in choices:
        known = f"{nearest(parsed.value(), choices)}{why_not_offered(name, parsed.value())}".replace("?.", "?")
        raise ConfigError(f"override '{override}': '{name}' has no choice '{parsed.value()}', {known}")
    return _Override(override, name, parsed.value(), is_choice)


def _group_choices(group: str, folders: Sequence[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _is_private(key: str) -> bool:
    """Whether a value is not to be repeated in a message: what is refused as an option is most often a password."""
    return secrets.names_secret(key) or key.startswith(store_options.KEY)


def _override_key(override: str) -> str:
    """An override for a sentence, by its key alone: a value that cannot be read may be half of a password."""
    key, sign, _ = override.partition("=")
    if not re.fullmatch(r"[~+]*[A-Za-z_][A-Za-z_./@-]{0,60}", key):
        return "one of the words"
    return f"'{key}=…'" if sign else f"'{key}'"


def _key_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Dotted key and line of every value in a YAML file, the defaults list left out."""

    def walk(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, yaml.MappingNode) and node.value:
            for name, value in node.value:
                dotted = f"{prefix}.{name.value}" if prefix else str(name.value)
                if dotted != "defaults":
                    yield from walk(value, dotted)
        elif prefix:
            yield prefix, node.start_mark.line + 1

    node = yaml.compose(safe_yaml.check_yaml(path), Loader=yaml.SafeLoader)
    if node is not None:
        yield from walk(node, "")


def _drop_origins_below(origins: dict[str, str], dotted: str) -> None:
    for known in [known for known in origins if known.startswith(dotted + ".")]:
        del origins[known]


def _refuse_instantiation(values: Any, composed: ComposedConfig, prefix: str = "") -> None:
    children = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in children:
        dotted = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(name, str) and name.startswith("_") and name.endswith("_"):
            raise ConfigError(
                f"'{dotted}' ({composed.origin(dotted)}): classes cannot be instantiated from a configuration; "
                "write a Task in Python and choose it by path/to/file.py:Class"
            )
        _refuse_instantiation(value, composed, dotted)


def _display_path(path: Path) -> str:
    """A path as a user would look for it: packaged files from the package, others from here."""
    packages = (Path(__file__).parents[1], *(folder.parent for folder in recipes.config_folders().values()))
    package = next((package for package in packages if path.is_relative_to(package)), None)
    if package is not None:
        return str(path.relative_to(package.parent))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _summarise_error(text: str) -> str:
    lines = text.split("Config search path:")[0].splitlines()
    return " ".join(line.strip() for line in lines if line.strip() and "https://" not in line)
