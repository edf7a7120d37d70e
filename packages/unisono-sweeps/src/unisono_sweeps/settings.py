"""The words of `unisono sweep` that are not settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from unisono.config.schema import Settings


def parse_list(value: Any) -> Any:
    """The list or mapping that a word stands for, as `[a,b]` or `{a: b}`."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError("cannot be read; write a list as [a,b] and a mapping as {a: b}") from error


def read_list(value: Any) -> Any:
    """A list that may be written as its only item."""
    read = parse_list(value)
    return read if isinstance(read, list) else [read]


def _check_folder(name: str) -> str:
    if Path(name).name != name or name in ("", ".", "..") or not name.isprintable():
        raise ValueError(f"must be the name of one folder, not {name!r}; use run.dir for the place")
    return name


FolderName = Annotated[str, AfterValidator(_check_folder)]
MOST_RUNS = 100_000  # of a sweep; more are a slip
Seeds = Annotated[Annotated[int, Field(gt=0, le=MOST_RUNS)] | list[int], BeforeValidator(parse_list)]
Zipped = Annotated[list[str] | list[list[str]], BeforeValidator(parse_list)]


class SweepSettings(Settings):
    """The settings of a sweep. On the command line they stand without a group: `seeds=3`."""

    name: FolderName | None = Field(None, description="folder of the sweep; null: the recipe and the swept keys")
    seeds: Seeds | None = Field(None, description="number of seeds of each run, from 0, or a list of them")
    zip: Zipped = Field([], description="swept keys that change together, e.g. [model.width,optim.lr]")
    draws: PositiveInt | None = Field(
        None, le=MOST_RUNS, description="random draws of the keys that have an interval(from,to)"
    )
    draw_seed: int = Field(0, description="seed of these draws")
    configs: Path | None = Field(None, description="Python file with configs(), which returns a list of settings")
    trial: bool = Field(True, description="build each model and run a micro-batch through it before anything starts")
    launcher: str = Field("local", description="where the runs run")

    @property
    def seed_list(self) -> list[int]:
        """The seeds, one after the other."""
        if self.seeds is None:
            return []
        return list(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    @property
    def zipped(self) -> list[list[str]]:
        """Groups of keys that change together."""
        groups = [group if isinstance(group, list) else [group] for group in self.zip]
        return groups if all(isinstance(group, list) for group in self.zip) else [[str(key) for key in self.zip]]
