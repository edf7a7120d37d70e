"""From the words of a command to the settings of each run: grids, zipped keys, ranges and random draws.

Values are written in Hydra's grammar of sweeps: `key=1,2`, `choice(…)`, `range(…)`, `glob(…)` over the files of a
group, and `interval(…)`, from which `draws=N` takes random values (`tag(log,interval(…))` on a logarithmic scale).
Which runs a command means is a function of its words alone, so the same command means the same runs.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.config.compose import Composer
from unisono.launch.task_objects import format_override
from unisono.runtime import rng
from unisono.runtime.errors import ConfigError, nearest
from unisono_sweeps.settings import MOST_RUNS, SweepSettings
from unisono_sweeps.user_file import flatten_settings, load_function

SEED = "run.seed"
_LONGEST_NAME = 100  # characters of the name of a run


@dataclass(frozen=True)
class Setting:
    """The value of a key in some runs.

    Attributes:
        key: dotted, or the name of a group.
        text: the value, as it stands after `key=` on a command line.
        origin: `file.py:line`; empty for a word of the command.
    """

    key: str
    text: str
    origin: str = ""

    @property
    def word(self) -> str:
        """The override."""
        return f"{self.key}={self.text}"


@dataclass(frozen=True)
class Point:
    """What distinguishes some runs from others: settings that belong together; `name` is the user's own for them."""

    settings: tuple[Setting, ...]
    name: str = ""


@dataclass(frozen=True)
class Interval:
    """A key to draw at random, between two numbers.

    Attributes:
        key: dotted.
        low: smallest value.
        high: largest value.
        log: whether the logarithm is uniform.
        whole: whether values are integers.
    """

    key: str
    low: float
    high: float
    log: bool
    whole: bool

    def value(self, share: float) -> float:
        """The value at a share in [0, 1) of the interval."""
        if self.whole:
            return min(int(self.high), int(self.low) + int(share * (int(self.high) - int(self.low) + 1)))
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
            return min(self.high, max(self.low, value))
        return self.low + share * (self.high - self.low)


@dataclass(frozen=True)
class Space:
    """The words of a command, read.

    Attributes:
        fixed: words that are the same in every run.
        choices: values by swept key, in the order of the command.
        intervals: keys to draw.
    """

    fixed: tuple[str, ...]
    choices: dict[str, list[str]]
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Variant:
    """One run of a sweep.

    Attributes:
        name: of the run.
        settings: that distinguish it.
    """

    name: str
    settings: tuple[Setting, ...] = field(default=())

    @property
    def words(self) -> list[str]:
        """Its overrides."""
        return [setting.word for setting in self.settings]


def read_space(words: Sequence[str], composer: Composer) -> Space:
    """Read the words of a command; those without several values are fixed.

    Raises:
        ConfigError: for a pattern that matches nothing, or a key that is given twice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob, IntervalSweep

    parser = OverridesParser.create()
    fixed: list[str] = []
    choices: dict[str, list[str]] = {}
    intervals: list[Interval] = []
    for word in words:
        try:
            parsed = parser.parse_override(word)
        except Exception:
            fixed.append(word)  # the composition reports it, with what it knows of keys
            continue
        if not parsed.is_sweep_override():
            fixed.append(word)
            continue
        key, value = parsed.get_key_element().lstrip("+"), parsed.value()
        if key in choices or any(key == interval.key for interval in intervals):
            raise ConfigError(f"'{key}' is swept twice; write all of its values in one word")
        if isinstance(value, IntervalSweep):
            intervals.append(_read_interval(key, value, word))
        elif isinstance(value, Glob):
            files = composer.choices(key)
            if not (matching := value.filter(files)):
                raise ConfigError(f"'{word}' matches nothing; {key} has {', '.join(files) or 'no files'}")
            choices[key] = list(matching)
        else:
            choices[key] = _list_values(parsed, word)
        if key in choices and (twice := [text for text, count in Counter(choices[key]).items() if count > 1]):
            raise ConfigError(f"'{word}' has the value {twice[0]} twice")
    return Space(tuple(fixed), choices, tuple(intervals))


def _list_values(parsed: Any, word: str) -> list[str]:
    try:
        values = list(itertools.islice(parsed.sweep_string_iterator(), MOST_RUNS + 1))
    except ValueError as error:  # as of a range whose step is zero
        raise ConfigError(f"'{word}': {error}") from error
    if not values:
        raise ConfigError(f"'{word}' has no values")
    return values


def _read_interval(key: str, value: Any, word: str) -> Interval:
    low, high, log = value.start, value.end, "log" in value.tags
    if other := value.tags - {"log"}:
        raise ConfigError(f"'{word}': the only tag is 'log', not '{sorted(other)[0]}'")
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (log and low <= 0):
        raise ConfigError(f"'{word}': write interval(from,to) with from < to{', both positive' if log else ''}")
    whole = isinstance(low, int) and isinstance(high, int)
    if whole and log:
        raise ConfigError(f"'{word}': an interval of integers has no logarithmic scale; write choice(…)")
    return Interval(key, low, high, log, whole)


def list_variants(words: Sequence[str], settings: SweepSettings, composer: Composer) -> tuple[list[str], list[Variant]]:
    """The words that all runs of a sweep share, and its runs in order: the last key changes fastest.

    Raises:
        ConfigError: for words that do not describe a sweep.
    """
    space = read_space(words, composer)
    axes = [*_zip_choices(space.choices, settings.zipped)]
    if space.intervals and settings.draws is None:
        raise ConfigError(f"{space.intervals[0].key} is an interval: say how many random draws of it, draws=N")
    if settings.draws is not None and not space.intervals:
        raise ConfigError(f"draws={settings.draws}, but no key has an interval(from,to) to draw from")
    if space.intervals:
        axes.append([_draw(space.intervals, settings.draw_seed, number) for number in range(settings.draws or 0)])
    if settings.configs is not None:
        axes.insert(0, read_configs(settings.configs))
    if settings.seeds is not None:
        if not settings.seed_list:
            raise ConfigError("seeds=[] names no seed")
        axes.append([Point((Setting(SEED, str(seed)),)) for seed in settings.seed_list])
    _refuse_double_keys(axes, space.fixed)
    if (count := math.prod(len(axis) for axis in axes)) > MOST_RUNS:
        raise ConfigError(f"the words mean {count} runs, more than the {MOST_RUNS} that a sweep may have")
    points = [tuple(chosen) for chosen in itertools.product(*axes)]
    return list(space.fixed), _name_variants(points, axes)


def _zip_choices(choices: Mapping[str, list[str]], zipped: Sequence[Sequence[str]]) -> list[list[Point]]:
    """One axis for each key, or group of keys that change together."""
    groups = {key: tuple(group) for group in zipped for key in group}
    for key in groups:
        if key not in choices:
            raise ConfigError(f"zip: '{key}' is not swept, {nearest(key, choices)}")
    axes, done = [], set()
    for key in choices:
        keys = groups.get(key, (key,))
        if keys in done:
            continue
        done.add(keys)
        lengths = {one: len(choices[one]) for one in keys}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{one} has {count}" for one, count in lengths.items())
            raise ConfigError(f"zip: keys that change together need equally many values, but {counts}")
        rows = zip(*(choices[one] for one in keys), strict=True)
        axes.append([Point(tuple(Setting(one, text) for one, text in zip(keys, row, strict=True))) for row in rows])
    return axes


def _draw(intervals: Sequence[Interval], seed: int, number: int) -> Point:
    """The random draw with a number: the same however many there are, and for whatever other keys."""
    drawn = []
    for interval in intervals:
        value = interval.value(rng.generator(seed, "sweep", interval.key, number).random())
        drawn.append(Setting(interval.key, str(value) if interval.whole else f"{value:.4g}"))
    return Point(tuple(drawn))


def read_configs(path: Path) -> list[Point]:
    """The settings of runs that a Python file of the user lists.

    Raises:
        ConfigError: if it has no `configs`, or that returns something else.
    """
    listed = load_function("configs", path, "configs", "configs() -> list[dict]")()
    if not isinstance(listed, list) or not listed or not all(isinstance(one, dict) and one for one in listed):
        raise ConfigError(f"{path}: configs() must return a list of dictionaries of settings, at least one")
    lines = _key_lines(path)
    points = []
    for given in listed:
        values = flatten_settings(path, {key: value for key, value in given.items() if key != "name"})
        found = {key: lines.get(key, lines.get(key.rpartition(".")[2])) for key in values}
        settings = [
            Setting(key, format_override(value), f"{path}:{found[key]}" if found[key] else str(path))
            for key, value in values.items()
        ]
        points.append(Point(tuple(settings), str(given.get("name", ""))))
    return points


def _key_lines(path: Path) -> dict[str, int]:
    """The line where each text of a Python file stands first."""
    lines: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines[node.value] = min(node.lineno, lines.get(node.value, node.lineno))
        elif isinstance(node, ast.keyword) and node.arg:
            lines[node.arg] = min(node.value.lineno, lines.get(node.arg, node.value.lineno))
    return lines


def _refuse_double_keys(axes: Sequence[Sequence[Point]], fixed: Sequence[str]) -> None:
    """Refuse a key that two parts of the command set: which of them counts would be a matter of their order."""
    known = {word.lstrip("+").partition("=")[0] for word in fixed}
    for axis in axes:
        keys = {setting.key for point in axis for setting in point.settings}
        if double := sorted(known & keys):
            raise ConfigError(f"'{double[0]}' is set twice; leave one of them out")
        known |= keys


def _name_variants(points: Sequence[tuple[Point, ...]], axes: Sequence[Sequence[Point]]) -> list[Variant]:
    short = shorten_keys(sorted({setting.key for axis in axes for point in axis for setting in point.settings}))
    variants = []
    for chosen in points:
        settings = tuple(setting for point in chosen for setting in point.settings)
        parts = [part for point in chosen for part in _name_parts(point, short)]
        name = "-".join(parts) or "run"
        exact = all(text == _slug(text) for text in (_plain(setting.text) for setting in settings))
        if len(name) > _LONGEST_NAME or not (exact or all(point.name for point in chosen)):
            digest = hashlib.sha256(json.dumps([setting.word for setting in settings]).encode()).hexdigest()
            name = f"{name[:_LONGEST_NAME]}-{digest[:6]}"
        variants.append(Variant(name, settings))
    if twice := [name for name, count in Counter(variant.name for variant in variants).items() if count > 1]:
        raise ConfigError(f"two runs of the sweep are the same, or have the same name: {twice[0]}")
    return variants


def _name_parts(point: Point, short: Mapping[str, str]) -> list[str]:
    if point.name:
        return [_slug(point.name)]
    parts = []
    for setting in point.settings:
        value = _slug(_plain(setting.text))
        parts.append(f"{short[setting.key]}{'' if value[:1].isdigit() else '-'}{value}")
    return parts


def shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last parts of dotted keys, as many as tell them apart.

    >>> shorten_keys(["optim.lr", "model.width", "a.b.width"])
    {'optim.lr': 'lr', 'model.width': 'model.width', 'a.b.width': 'b.width'}
    """
    short = {}
    for key in keys:
        parts = re.split(r"[./]", key)
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        others = [re.split(r"[./]", other) for other in keys if other != key]
        short[key] = next(
            (end for end in ends if not any(".".join(o[-len(end.split(".")) :]) == end for o in others)), key
        )
    return short


def _plain(text: str) -> str:
    """A value without its quotes."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+_-]+", "_", text)
