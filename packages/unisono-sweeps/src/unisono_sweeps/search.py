"""`unisono search`: Optuna proposes settings, and each trial is a run like any other.

The study is a journal file in the folder of the search, which several processes may share. A trial that was interrupted
is the same run when the search starts again: it resumes from its checkpoint, and its result is that of an unbroken one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unisono.cli import elsewhere
from unisono.config.compose import Composer
from unisono.config.key_values import parse_settings, split_words
from unisono.launch.launcher import Ended, Hosts, Job, Launcher, describe_job
from unisono.launch.task_objects import format_override
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, UnisonoError, nearest
from unisono.runtime.files import write_whole
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_writing
from unisono.runtime.untrusted.shapes import misfit
from unisono.supervise import identity
from unisono.supervise.run_facts import read_run_facts
from unisono_sweeps import record
from unisono_sweeps.axes import Setting, Variant, read_space
from unisono_sweeps.compare.table import is_number, measure
from unisono_sweeps.launchers.local import LocalLauncher
from unisono_sweeps.planning import PlannedRun, Sweep, plan_runs
from unisono_sweeps.study import (
    SearchSettings,
    distributions,
    import_optuna,
    open_study,
    refuse_other_search,
    suggest,
)
from unisono_sweeps.sweep import build_job, split_place
from unisono_sweeps.text_table import format_number
from unisono_sweeps.user_file import flatten_settings, load_function

BEST = "best"  # folder of YAML files that `unisono train` takes
_OWNER = "owner"  # of a trial: which process runs it
_LOOK_EVERY = 1.0  # seconds between looks at the evaluations of a run


@dataclass
class _Search:
    settings: SearchSettings
    study: Any
    recipe: str
    config_dir: Path | None
    composer: Composer
    fixed: tuple[str, ...]
    propose: Callable[[Any], dict[str, str]]
    folder: Path
    hosts: Hosts | None
    under_way: Mapping[str, str] = field(default_factory=dict)
    _running: dict[str, _Trial] = field(default_factory=dict)

    def plan(self, trial: Any) -> tuple[Sweep, PlannedRun]:
        """The run of a trial.

        Raises:
            UnisonoError: if its settings do not fit together.
        """
        settings = tuple(Setting(key, text) for key, text in self.propose(trial).items())
        variant = Variant(f"trial-{trial.number:05d}", settings)
        sweep = Sweep(self.recipe, self.config_dir, self.fixed, (variant,), self.folder)
        return sweep, plan_runs(sweep, self.composer, trial=False, hosts=self.hosts, under_way=self.under_way)[0]

    def jobs(self) -> Iterator[Job]:
        """The trials that an earlier start left unfinished, then new ones."""
        optuna = import_optuna()
        for frozen in self.study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            owner = frozen.user_attrs.get(_OWNER)
            if misfit(owner, identity.Identity) is None and identity.is_alive(owner) is not False:
                continue  # another process runs it
            if (job := self._prepare(optuna.trial.Trial(self.study, frozen._trial_id))) is not None:
                yield job
        while self._count() < self.settings.trials:
            if (job := self._prepare(self.study.ask())) is not None:
                yield job

    def _count(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    def _prepare(self, trial: Any) -> Job | None:
        """The job of a trial; None if its settings do not fit together, which is said.

        Raises:
            UnisonoError: if that is so in the first trial: the search itself is then wrong.
        """
        trial.set_user_attr(_OWNER, identity.own_identity())
        try:
            sweep, run = self.plan(trial)
        except UnisonoError as error:
            self._tell(trial, "FAIL")
            if trial.number == 0:
                raise
            say(f"trial-{trial.number:05d}: {one_line(' '.join(str(error).split()), 600)}", error=True)
            return None
        settings = {setting.key: setting.text for setting in run.variant.settings}
        record.write_sweep(self.folder, [], {run.variant.name: settings})
        self._running[run.variant.name] = _Trial(trial, run.folder)
        return build_job(sweep, run)

    def started(self, job: Job) -> None:
        """Say which settings a trial has."""
        trial = self._running[job.name].trial
        shown = ", ".join(f"{key}={format_number(value)}" for key, value in trial.params.items())
        say(f"{job.name}: {shown}")

    def stops(self, job: Job) -> bool:
        """Report the new evaluations of a run to the study; true once it is to be pruned."""
        one = self._running[job.name]
        if not self.settings.prune or len(self.settings.metric) > 1 or time.monotonic() < one.next_look:
            return False
        one.next_look = time.monotonic() + _LOOK_EVERY
        metric = self.settings.metric[0]
        if one.pruned or not metric.startswith("eval/") or not (one.folder / "events.jsonl").is_file():
            return False
        with suppress(OSError, UnisonoError):  # of a folder that cannot be read; its end says so
            one.evaluations = read_run_facts(one.folder).evaluations
        for event in one.evaluations:
            value = event.get(metric.removeprefix("eval/"))
            if event["step"] > one.reported and is_number(value):
                one.trial.report(float(value), event["step"])
                one.reported = event["step"]
                # After each: the last of several may be beyond the steps of all trials that it can be compared with.
                if one.trial.should_prune():
                    one.pruned = True
                    break
        return one.pruned

    def ended(self, job: Job, how: Ended) -> None:
        """Tell the study how a trial ended; one that was interrupted stays open."""
        one = self._running.pop(job.name)
        how, facts = record.judge_end(one.folder, how)
        if facts is not None:
            found = measure(facts)
            values = [found.get(metric) for metric in self.settings.metric]
            if None not in values:
                self._tell(one.trial, "COMPLETE", [float(value) for value in values if value is not None])
                reached = zip(self.settings.metric, values, strict=True)
                say(f"{job.name}: {', '.join(f'{metric} {format_number(value)}' for metric, value in reached)}")
                return
            missing = self.settings.metric[values.index(None)]
            why = f"the run has no {missing}; {nearest(missing, found)}"
            why = f"its {missing} is not finite" if missing in found else why
        elif how.code == 75 and one.pruned:
            self._tell(one.trial, "PRUNED")
            say(f"{job.name}: pruned after step {one.reported}")
            return
        elif how.code == 75:
            say(f"{job.name}: saved and stopped" + (f": {how.why}" if how.why else ""))
            return
        else:
            why = how.why
        self._tell(one.trial, "FAIL")
        say(f"{job.name}: failed: {one_line(why, 600)}; all that it printed is in {job.console}", error=True)

    def _tell(self, trial: Any, state: str, values: Sequence[float] | None = None) -> None:
        self.study.tell(trial, values, state=import_optuna().trial.TrialState[state])


@dataclass
class _Trial:
    trial: Any
    folder: Path
    reported: int = 0
    evaluations: Sequence[Mapping[str, Any]] = ()
    pruned: bool = False
    next_look: float = 0.0


def run_search(recipe: str, config_dir: Path | None, words: Sequence[str]) -> int:
    """Run a search until it has its number of trials; returns 0 if any of them succeeded, else 1.

    Raises:
        UnisonoError: for settings that do not fit, before the first trial.
    """
    optuna = import_optuna()
    settings, rest = parse_settings(words, SearchSettings)
    launcher, rest = elsewhere.read_launcher(settings.launcher, rest)
    # What only writes a pod cannot see how trials end: the search itself is written, which runs them there as here.
    if not launcher.waits:
        there, rest = parse_settings(rest, LocalLauncher.Settings)
    composer = Composer(recipe, config_dir)
    space = read_space(rest, composer)
    propose = _propose_from_file(settings.space) if settings.space is not None else None
    if propose is None and not (space.choices or space.intervals):
        raise ConfigError(
            "no key has several values to search; write e.g. 'optim.lr=tag(log,interval(1e-5,1e-2))', or space=FILE.py"
        )
    swept = Variant("", tuple(Setting(key, "") for key in (*space.choices, *(one.key for one in space.intervals))))
    fixed, _, folder = split_place(space.fixed, [swept], recipe, settings.name)
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def propose_words(trial: Any) -> dict[str, str]:
        words = {key: str(suggest(trial, key, one)) for key, one in distributions(space).items()}
        return {**words, **(propose(trial) if propose is not None else {})}

    search = _Search(settings, None, recipe, config_dir, composer, fixed, propose_words, folder, launcher.hosts())
    if not launcher.waits:
        return _write_search(search, launcher, there.jobs, _drop_words(words, launcher))
    folder.mkdir(parents=True, exist_ok=True)
    study = open_study(folder, settings)
    refuse_other_search(study, folder, settings, recipe, fixed, space)
    search.study, search.under_way = study, launcher.under_way(folder / record.CONSOLE)
    launcher.run(search.jobs(), search.started, search.ended, search.stops)
    return _report_best(study, settings, folder)


def _drop_words(words: Sequence[str], launcher: Launcher) -> list[str]:
    """The words of a command that are not about its launcher."""
    left = split_words(words, launcher.Settings)[1]
    return [word for word in left if not word.startswith("launcher=")]


def _write_search(search: _Search, launcher: Launcher, at_once: int, words: Sequence[str]) -> int:
    """Let a launcher write the search itself, after a check of what it would try first; returns the exit code.

    Args:
        search: without a study.
        launcher: that only writes.
        at_once: trials at a time in the one host of the search, which its accelerators are divided among.
        words: of the command there.

    Raises:
        UnisonoError: for settings that do not fit together, or a trial that does not fit there.
    """
    hosts = launcher.hosts()
    search.hosts = None if hosts is None else Hosts(1, hosts.gpus // at_once)
    trial = import_optuna().create_study(directions=search.settings.directions).ask()
    first = describe_job("", (), search.plan(trial)[1].config, Path())
    own = ["--config-dir", str(search.config_dir)] if search.config_dir else []
    job = Job(
        search.folder.name,
        (sys.executable, "-m", "unisono", "search", search.recipe, *own, *words),
        search.folder,
        search.folder / record.CONSOLE / "search.log",
        first.processes * at_once,
        first.devices * at_once,
        first.workers * at_once,
        one_host="leave nodes= out: its trials run there, jobs= at a time",
    )
    launcher.check([job])
    return elsewhere.follow(launcher, job)


def _propose_from_file(path: Path) -> Callable[[Any], dict[str, str]]:
    """A function of the user's own that proposes settings, some of which may depend on others."""
    function = load_function("space", path, "space", "space(trial) -> dict")

    def propose(trial: Any) -> dict[str, str]:
        given = function(trial)
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: space(trial) must return a dictionary of settings")
        return {key: format_override(value) for key, value in flatten_settings(path, given).items()}

    return propose


def _report_best(study: Any, settings: SearchSettings, folder: Path) -> int:
    """Say which trials were best, and write their configurations."""
    complete = import_optuna().trial.TrialState.COMPLETE
    finished = study.get_trials(states=(complete,))
    if not finished:
        say("no trial succeeded", error=True)
        return 1
    best = study.best_trials
    for number, frozen in enumerate(best):
        name = "best" if len(best) == 1 else f"best_{number + 1}"
        values = ", ".join(f"{m} {format_number(v)}" for m, v in zip(settings.metric, frozen.values, strict=True))
        run = folder / f"trial-{frozen.number:05d}"
        write_best(run, folder / BEST / f"{name}.yaml")
        say(f"best of {len(finished)}: {run.name} with {values}")
        say(f"  train it: unisono train --config-dir {folder / BEST} {name}")
    return 0


def write_best(run: Path, path: Path) -> None:
    """Write the configuration of a run as one that `unisono train --config-dir` takes, for any layout."""
    config = dict(read_run_facts(run).config)
    kept = {name: value for name, value in config.items() if name not in ("layout", "launch", "run")}
    kept["run"] = {"seed": config["run"]["seed"]}
    safe_writing.make_folder(path.parents[1], path.parent.name)
    write_whole(path, yaml.safe_dump(kept, sort_keys=False))
