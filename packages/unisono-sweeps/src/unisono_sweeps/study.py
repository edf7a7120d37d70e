"""The study of a search: Optuna's journal file, which several processes may share, and what it is a study of.

A journal whose last line is torn, as by a crash, loses that line alone. One of another search is refused: its trials
would be compared with those of this one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from unisono.config.schema import Settings
from unisono.runtime.code.entry_points import import_extra
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono_sweeps.axes import Space
from unisono_sweeps.settings import FolderName, read_list

STUDY = "study.journal"
_ABOUT = "search"  # attribute of the study: what it is a study of
_ELSEWHERE = ("layout.", "launch.", "run.", "observe.", "checkpoint.")  # words that may change: they change no result
_DECISIVE = ("run.seed=", "run.stop_after=")  # but these do


class SearchSettings(Settings):
    """The words of `unisono search`."""

    trials: PositiveInt = Field(description="number of trials of the whole search, with those of earlier starts")
    metric: Annotated[list[str], BeforeValidator(read_list)] = Field(
        ["eval/loss"], min_length=1, description="column of `unisono compare` to optimise, or a list of them"
    )
    mode: Annotated[list[Literal["min", "max"]], BeforeValidator(read_list)] = Field(
        ["min"], description="whether the smallest or the largest value is best; one for each metric"
    )
    prune: bool = Field(True, description="stop a run early if its evaluations are worse than the median's")
    name: FolderName | None = Field(None, description="folder of the search; null: the recipe and the keys")
    seed: int = Field(0, description="of the sampler")
    space: Path | None = Field(None, description="Python file with space(trial), which returns settings of a run")
    launcher: str = Field("local", description="where the runs run")

    @model_validator(mode="after")
    def _check_modes(self) -> SearchSettings:
        if len(self.mode) not in (1, len(self.metric)):
            raise ValueError(f"mode has {len(self.mode)} values for {len(self.metric)} metrics")
        return self

    @property
    def directions(self) -> list[str]:
        """In Optuna's words, one for each metric."""
        modes = self.mode * len(self.metric) if len(self.mode) == 1 else self.mode
        return ["minimize" if mode == "min" else "maximize" for mode in modes]


def import_optuna() -> Any:
    """Optuna, which only a search needs.

    Raises:
        ConfigError: if it is not installed.
    """
    return import_extra("optuna", "search", "unisono search", of="unisono-sweeps")


def open_study(folder: Path, settings: SearchSettings) -> Any:
    """Optuna's study in the folder of a search, which is created where there is none.

    Raises:
        ConfigError: for a journal that cannot be read, or has other directions.
    """
    optuna, path = import_optuna(), folder / STUDY
    if os.path.lexists(path) and not safe_paths.is_inside(folder, STUDY):
        raise ConfigError(f"{path} is not a file in that folder; remove it, or choose another name=")
    lock = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    with wrap_native_errors(f"{path} cannot be read", ConfigError, "remove it, or choose another name="):
        _drop_torn_line(path, lock)
        backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=lock)
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name="search",
            directions=settings.directions,
            sampler=optuna.samplers.TPESampler(seed=settings.seed, multivariate=False),
            pruner=optuna.pruners.MedianPruner() if settings.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
    there = [direction.name.lower() for direction in study.directions]
    if there != settings.directions:
        raise ConfigError(f"{folder} holds a search with other directions ({', '.join(there)}); choose another name=")
    return study


def _drop_torn_line(path: Path, lock: Any) -> None:
    """Shorten a journal to its last whole line: whatever was appended to half a line could not be read any more."""
    if not path.exists():
        return
    lock.acquire()  # a line that another process is writing is not torn
    try:
        with safe_paths.open_inside(path.parent, path.name) as file:
            content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
            say(f"unisono: WARNING: {path} ended within a line, as after a crash; it is left out", error=True)
    finally:
        lock.release()


def refuse_other_search(
    study: Any, folder: Path, settings: SearchSettings, recipe: str, fixed: Sequence[str], space: Space
) -> None:
    """Refuse a study of something else, whose trials cannot be compared with those to come.

    Args:
        study: of Optuna, which notes what it is a study of.
        folder: of the search.
        settings: of the search.
        recipe: that is trained.
        fixed: words of all trials.
        space: of the command.

    Raises:
        ConfigError: naming what differs.
    """
    optuna = import_optuna()
    about = {
        "recipe": [recipe],
        "metric": settings.metric,
        "settings of all trials": sorted(
            word for word in fixed if word.startswith(_DECISIVE) or not word.startswith(_ELSEWHERE)
        ),
        "space": [str(settings.space)] if settings.space else [],
    }
    there = study.user_attrs.get(_ABOUT)
    if there is None:
        study.set_user_attr(_ABOUT, about)
    for what, words in about.items():
        if isinstance(there, dict) and there.get(what) != words:
            shown = ", ".join(map(str, there[what])) if isinstance(there.get(what), list) else ""
            raise ConfigError(
                f"{folder} holds another search: {what}: {one_line(shown) or 'none'} there, and "
                f"{', '.join(words) or 'none'} here; choose another name="
            )
    wanted = distributions(space)
    for trial in study.get_trials(deepcopy=False):
        for key, one in wanted.items():
            try:
                if key in trial.distributions:
                    optuna.distributions.check_distribution_compatibility(trial.distributions[key], one)
            except ValueError as error:
                raise ConfigError(
                    f"{folder} holds a search with other values of {key}; choose another name="
                ) from error


def distributions(space: Space) -> dict[str, Any]:
    """Optuna's words for what a command lets vary, by key."""
    kinds = import_optuna().distributions
    found: dict[str, Any] = {key: kinds.CategoricalDistribution(values) for key, values in space.choices.items()}
    for one in space.intervals:
        whole = kinds.IntDistribution(int(one.low), int(one.high)) if one.whole else None
        found[one.key] = whole or kinds.FloatDistribution(one.low, one.high, log=one.log)
    return found


def suggest(trial: Any, key: str, distribution: Any) -> str:
    """The value of a key in a trial, as it stands after `key=`."""
    kinds = import_optuna().distributions
    if isinstance(distribution, kinds.CategoricalDistribution):
        return str(trial.suggest_categorical(key, distribution.choices))
    if isinstance(distribution, kinds.IntDistribution):
        return str(trial.suggest_int(key, distribution.low, distribution.high))
    return repr(trial.suggest_float(key, distribution.low, distribution.high, log=distribution.log))
