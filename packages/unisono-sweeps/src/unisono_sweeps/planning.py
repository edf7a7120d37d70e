"""Every run of a sweep is resolved and checked before the first one starts, and all mistakes are reported together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.config import CONFIG_FILE, fingerprint
from unisono.config.compose import ComposedConfig, Composer
from unisono.config.schema.run import RunConfig
from unisono.launch import launcher
from unisono.launch.launcher import Hosts
from unisono.launch.resolving import preflight, run_directory
from unisono.optim import ema, schedules
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.runtime.text import join_names
from unisono.supervise import disk_space, run_lock
from unisono.supervise.run_facts import RunFacts, read_run_facts
from unisono.task_config import build_task, validate_config
from unisono_sweeps import record
from unisono_sweeps.axes import Variant
from unisono_sweeps.trial_process import Trials

_UNRELATED_TO_DATA = ("optim", "schedules", "ema")  # groups on which the rows of a run and their number do not depend
_UNRELATED_TO_MODEL = ("run", "optim", "schedules", "checkpoint", "observe", "eval", "callbacks", "launch")


@dataclass(frozen=True)
class Estimate:
    """What a run will take, from a trial of its model on one process of this host.

    Attributes:
        parameters: that are trained.
        seconds: of all steps, one after the other.
        flops: of all steps; None if the task does not count them.
        disk: bytes of its checkpoints.
    """

    parameters: int
    seconds: float
    flops: float | None
    disk: int


@dataclass(frozen=True)
class PlannedRun:
    """A run that may start.

    Attributes:
        variant: what distinguishes it.
        words: all its overrides.
        config: resolved for this host.
        steps: of the whole run.
        state: `new`, `finished`, `resumes after step N`, or where it is under way.
        estimate: None if its model was not tried.
    """

    variant: Variant
    words: tuple[str, ...]
    config: RunConfig
    steps: int
    state: str = "new"
    estimate: Estimate | None = None

    @property
    def folder(self) -> Path:
        """Of the run."""
        return run_directory.run_path(self.config)


@dataclass(frozen=True)
class Sweep:
    """What a command asks for, before it is checked.

    Attributes:
        recipe: as for `unisono train`.
        config_dir: of the user's own YAML; None if there is none.
        fixed: words that all runs share.
        variants: the runs.
        folder: of all of them.
    """

    recipe: str
    config_dir: Path | None
    fixed: tuple[str, ...]
    variants: tuple[Variant, ...]
    folder: Path

    def words(self, variant: Variant, config: RunConfig | None = None) -> tuple[str, ...]:
        """All overrides of a run; of one whose configuration is known, also its group in trackers that it has."""
        place = [f"run.dir={_quote(str(self.folder))}", f"run.name={_quote(variant.name)}"]
        if config is not None and config.observe.trackers and config.observe.group is None:
            place.append(f"observe.group={_quote(self.folder.name)}")
        return (*self.fixed, *variant.words, *place)


class _Mistakes:
    """Messages, each with the runs that it is about."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._runs: dict[str, list[str]] = {}

    def add(self, message: str, variants: Iterable[Variant]) -> None:
        """Note a message; settings from a file are named by their line."""
        variants = list(variants)
        for setting in (setting for variant in variants for setting in variant.settings if setting.origin):
            message = message.replace(f"override '{setting.word}'", setting.origin)
        self._runs.setdefault(message, []).extend(variant.name for variant in variants)

    def refuse(self) -> None:
        """Raise if there are any.

        Raises:
            ConfigError: all of them.
        """
        if not self._runs:
            return
        bad, total = len({name for names in self._runs.values() for name in names}), len(self._sweep.variants)
        lines = [f"{bad} of {total} run{'s' * (total != 1)} cannot start, so none was started:"]
        for message, names in self._runs.items():
            whose = f"all {total} runs" if len(names) == total > 1 else join_names(dict.fromkeys(names), 3)
            lines += [f"  {whose}:", *(f"    {line}" for line in message.splitlines())]
        raise ConfigError("\n".join(lines))


def plan_runs(
    sweep: Sweep,
    composer: Composer,
    *,
    trial: bool,
    hosts: Hosts | None = None,
    under_way: Mapping[str, str] | None = None,
) -> list[PlannedRun]:
    """Resolve and check every run of a sweep.

    Args:
        sweep: what was asked for.
        composer: of its recipe.
        trial: whether to build each model and run a micro-batch through it.
        hosts: what a launcher reserves for each run; None: this one, as for a run of its own.
        under_way: where runs are that an earlier command has started, by name.

    Raises:
        ConfigError: all that keeps any of the runs from starting.
    """
    with ExitStack() as stack:
        trials = stack.enter_context(Trials(sweep.recipe)) if trial else None
        return _plan(sweep, composer, trials, hosts, under_way or {})


def _plan(
    sweep: Sweep, composer: Composer, trials: Trials | None, hosts: Hosts | None, under_way: Mapping[str, str]
) -> list[PlannedRun]:
    mistakes = _Mistakes(sweep)
    configs: dict[Variant, RunConfig] = {}
    for variant in sweep.variants:
        try:
            composed = composer.compose(sweep.words(variant))
            configs[variant] = _resolve(composed, hosts)
        except UnisonoError as error:
            for line in str(error).splitlines():
                mistakes.add(line, [variant])
    steps: dict[Variant, int] = {}
    for variants in _group(configs, _data_key).values():
        try:
            first = configs[variants[0]]
            data = preflight.preflight(build_task(first), first)
        except UnisonoError as error:
            mistakes.add(str(error), variants)
            continue
        assert data.steps is not None
        for variant in variants:
            try:
                schedules.ScheduledScalars(configs[variant], data.steps)
                ema.check(configs[variant].ema, data.steps)
                steps[variant] = data.steps
            except UnisonoError as error:
                mistakes.add(str(error), [variant])
    planned = []
    ended = record.read_outcomes(sweep.folder)
    for variant, total in steps.items():
        run = PlannedRun(variant, sweep.words(variant, configs[variant]), configs[variant], total)
        try:
            planned.append(replace(run, state=_read_state(run, ended.get(variant.name), under_way.get(variant.name))))
        except UnisonoError as error:
            mistakes.add(str(error), [variant])
    if trials is not None:
        planned = _try_models(sweep, planned, mistakes, trials)
    mistakes.refuse()
    order = {variant: number for number, variant in enumerate(sweep.variants)}
    return sorted(planned, key=lambda run: order[run.variant])


def _resolve(composed: ComposedConfig, hosts: Hosts | None) -> RunConfig:
    config = launcher.resolve_layout(validate_config(composed), hosts)
    run_directory.refuse_unusable(config)
    return config


def _read_state(run: PlannedRun, ended: Mapping[str, Any] | None, under_way: str | None) -> str:
    """What there is of a run.

    Raises:
        UnisonoError: if its folder holds another run, or a process that trains it.
    """
    if not (run.folder / CONFIG_FILE).is_file():
        return under_way or "new"
    if under_way is None and (holder := run_lock.find_holder(run.folder)) is not None:
        raise ConfigError(f"{run.folder} is being trained by process {holder['pid']} on {holder['host']}; wait for it")
    facts = read_run_facts(run.folder)
    if changed := fingerprint.changed_keys(dict(facts.config), run.config, random=False):
        what = "; ".join(f"{key} was {there} and is {here}" for key, (there, here) in changed.items())
        raise ConfigError(
            f"{run.folder} holds a run with another configuration: {what}. Choose another name= for the sweep, or "
            "remove that run"
        )
    saved = record.newest_step(run.folder)
    if facts.state == "finished" or saved >= run.steps or (ended is not None and _has_ended_early(run, facts, ended)):
        return "finished"
    if under_way is not None:
        return under_way
    return f"resumes after step {saved}" if saved else "starts again"


def _has_ended_early(run: PlannedRun, facts: RunFacts, ended: Mapping[str, Any]) -> bool:
    """Whether a run ended before its last step by its own rules (`eval.patience`, a callback), and they still hold."""
    before, now = dict(facts.config), run.config.model_dump(mode="json")
    rules = [(values["run"].get("stop_after"), values["eval"], values.get("callbacks")) for values in (before, now)]
    held = rules[0] == rules[1] and ended["steps"] == run.steps
    return held and ended["code"] == 0 and not record.was_stopped_by_user(facts)


def _try_models(sweep: Sweep, planned: list[PlannedRun], mistakes: _Mistakes, trials: Trials) -> list[PlannedRun]:
    """The same runs with estimates from trials, one for each model that is still to be trained."""
    waiting = {run.variant: run for run in planned if run.state != "finished"}
    groups = list(_group({variant: run.config for variant, run in waiting.items()}, _model_key).values())
    requests = [
        {
            "number": number,
            "recipe": sweep.recipe,
            "config_dir": str(sweep.config_dir) if sweep.config_dir else "",
            "words": sweep.words(variants[0]),
        }
        for number, variants in enumerate(groups)
    ]
    estimates: dict[Variant, Estimate] = {}
    for number, outcome in enumerate(trials.run(requests)):
        if "error" in outcome:
            mistakes.add(outcome["error"], groups[number])
            continue
        for variant in groups[number]:
            estimates[variant] = _estimate(waiting[variant], outcome)
    return [replace(run, estimate=estimates.get(run.variant)) for run in planned]


def _estimate(run: PlannedRun, measured: Mapping[str, float]) -> Estimate:
    parameters, config = int(measured["parameters"]), run.config
    count = disk_space.count_checkpoints(config, 0, run.steps)
    kept = count if config.checkpoint.keep_every else min(count, config.checkpoint.keep)
    flops = measured.get("flops")
    return Estimate(
        parameters,
        measured["seconds"] * run.steps,
        None if flops is None else flops * run.steps,
        disk_space.estimate_size(config, parameters) * kept,
    )


def _data_key(config: RunConfig) -> str:
    """Equal for runs whose data need to be looked at only once; a seed matters where rows are packed by their order."""
    packed = config.data.packing is not None
    return _without(config, _UNRELATED_TO_DATA if packed else ("run", *_UNRELATED_TO_DATA))


def _model_key(config: RunConfig) -> str:
    """Equal for runs whose model needs to be tried only once."""
    return _without(config, _UNRELATED_TO_MODEL) + config.optim.kind


def _without(config: RunConfig, groups: Iterable[str]) -> str:
    return json.dumps(config.model_dump(mode="json", exclude=set(groups)), sort_keys=True)


def _group(configs: Mapping[Variant, RunConfig], key: Callable[[RunConfig], str]) -> dict[str, list[Variant]]:
    groups: dict[str, list[Variant]] = {}
    for variant, config in configs.items():
        groups.setdefault(key(config), []).append(variant)
    return groups


def _quote(text: str) -> str:
    from unisono.launch.task_objects import format_override

    return text if text.replace("/", "").replace("_", "").replace("-", "").isalnum() else format_override(text)
