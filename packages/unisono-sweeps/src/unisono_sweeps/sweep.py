"""`unisono sweep`: from the words of a command to finished runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from unisono.cli import elsewhere
from unisono.config.compose import Composer
from unisono.config.key_values import parse_settings
from unisono.config.schema.run import Run
from unisono.launch.launcher import Ended, Job, Launcher, describe_job
from unisono.launch.resolving import run_directory
from unisono.runtime.console import say, terminal_width
from unisono.runtime.display.preparing import preparing
from unisono.runtime.display.text_table import format_table
from unisono.runtime.errors import ConfigError
from unisono.runtime.text import format_bytes, one_line
from unisono_sweeps import record
from unisono_sweeps.axes import Setting, Variant, list_variants, shorten_keys
from unisono_sweeps.planning import PlannedRun, Sweep, plan_runs
from unisono_sweeps.settings import SweepSettings
from unisono_sweeps.text_table import format_number, format_seconds

_LONGEST_SENTENCE = 600  # characters of an error that are shown


def run_sweep(recipe: str, config_dir: Path | None, words: Sequence[str], *, dry_run: bool) -> int:
    """Check all runs of a sweep, and run those that are not finished; returns the exit code.

    Raises:
        ConfigError: before anything starts, with all that keeps any of the runs from starting.
    """
    settings, launcher, rest = read_words(words)
    composer = Composer(recipe, config_dir)
    fixed, variants = list_variants(rest, settings, composer)
    sweep = Sweep(recipe, config_dir, *split_place(fixed, variants, recipe, settings.name))
    under_way = launcher.under_way(sweep.folder / record.CONSOLE)
    with preparing(f"checking all runs of {recipe}"):
        planned = plan_runs(sweep, composer, trial=settings.trial, hosts=launcher.hosts(), under_way=under_way)
    launcher.check([build_job(sweep, run) for run in planned])
    if dry_run:
        say("\n".join(describe_plan(sweep, planned)))
        return 0
    return start_runs(sweep, planned, launcher, ["unisono", "sweep", recipe, *words])


def read_words(words: Sequence[str]) -> tuple[SweepSettings, Launcher, list[str]]:
    """The settings of a sweep, its launcher, and the words that are settings of the runs.

    Raises:
        ConfigError: for a setting that does not fit, or a launcher that is not installed.
    """
    settings, rest = parse_settings(words, SweepSettings)
    launcher, rest = elsewhere.read_launcher(settings.launcher, rest)
    return settings, launcher, rest


def split_place(
    words: Sequence[str], variants: Sequence[Variant], recipe: str, name: str | None
) -> tuple[tuple[str, ...], tuple[Variant, ...], Path]:
    """The words without `run.dir`, the runs, and the folder of the sweep.

    Raises:
        ConfigError: for a `run.name`: the sweep names its runs.
    """
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    if "run.name" in keys:
        raise ConfigError("run.name: a sweep names its runs after what distinguishes them; name the sweep by name=…")
    place = next((word.partition("=")[2] for word in reversed(words) if word.startswith("run.dir=")), None)
    parent = Path(place.strip("'\"")) if place is not None else Run.model_fields["dir"].default
    swept = shorten_keys(list(dict.fromkeys(setting.key for variant in variants for setting in variant.settings)))
    stem = Path(recipe.partition(":")[0]).stem
    folder = parent / (name or "-".join([stem, *(short.replace(".", "_") for short in swept.values())])[:100])
    if folder.exists() and any(folder.iterdir()) and not record.is_sweep(folder):
        raise ConfigError(f"{folder} is not empty and is not the folder of a sweep; choose another name=")
    return tuple(word for word in words if not word.startswith("run.dir=")), tuple(variants), folder


def build_job(sweep: Sweep, run: PlannedRun) -> Job:
    """The command of a run, as a user would type it."""
    own = ["--config-dir", str(sweep.config_dir)] if sweep.config_dir else []
    command = [sys.executable, "-m", "unisono", "train", sweep.recipe, *own, *run.words]
    console = sweep.folder / record.CONSOLE / f"{run.variant.name}.log"
    return describe_job(run.variant.name, command, run.config, console)


def start_runs(sweep: Sweep, planned: Sequence[PlannedRun], launcher: Launcher, command: Sequence[str]) -> int:
    """Run what is not finished; returns 0 if all runs are finished in the end, else 1."""
    record.write_sweep(
        sweep.folder,
        command,
        {run.variant.name: {setting.key: setting.text for setting in run.variant.settings} for run in planned},
    )
    waiting = {run.variant.name: run for run in planned if run.state != "finished"}
    done = len(planned) - len(waiting)
    say(f"{sweep.folder}: {_count(len(planned), 'run')}" + (f", {done} of them finished already" if done else ""))
    failed: list[str] = []

    def started(job: Job) -> None:
        state = waiting[job.name].state
        say(f"{job.name}: {launcher.begins if state == 'new' else state}")

    def ended(job: Job, how: Ended) -> None:
        nonlocal done
        run = waiting[job.name]
        how, facts = record.judge_end(run.folder, how)
        outcome: record.Outcome = {
            "run": job.name, "code": how.code, "seconds": how.seconds, "steps": run.steps, "why": how.why
        }  # fmt: skip
        record.add_outcome(sweep.folder, outcome)
        if facts is not None:
            done += 1
            took, loss = format_seconds(how.seconds), format_number(facts.loss)
            say(f"{job.name}: finished in {took}, loss {loss}  [{done}/{len(planned)}]")
        elif how.code == 75:
            say(f"{job.name}: saved and stopped" + (f": {how.why}" if how.why else ""))
        else:
            failed.append(job.name)
            say(f"{job.name}: failed with exit code {how.code}: {one_line(how.why, _LONGEST_SENTENCE)}", error=True)
            say(f"  all that it printed is in {job.console}", error=True)

    with run_directory.hold_directory(sweep.folder):
        launcher.run([build_job(sweep, run) for run in waiting.values()], started, ended)
    if failed:
        say(f"{_count(len(failed), 'run')} failed; the same command runs only what is not finished", error=True)
    if not launcher.waits:
        return 0
    say(f"compare them: unisono compare {sweep.folder}")
    return int(done < len(planned))


def describe_plan(sweep: Sweep, planned: Sequence[PlannedRun]) -> list[str]:
    """The table of a dry run: what distinguishes the runs, and what each will take."""
    keys = list(dict.fromkeys(setting.key for run in planned for setting in run.variant.settings))
    values = {run.variant.name: {s.key: _shown(s) for s in run.variant.settings} for run in planned}
    short = shorten_keys(keys)
    rows = []
    for run in planned:
        estimate = run.estimate
        rows.append([
            *(values[run.variant.name].get(key, "") for key in keys),
            run.state,
            str(run.steps),
            "–" if estimate is None else f"{estimate.parameters:.3g}".replace("e+0", "e"),
            "–" if estimate is None or estimate.flops is None else f"{estimate.flops:.2e}",
            format_seconds(estimate.seconds if estimate else None),
            format_bytes(estimate.disk) if estimate else "–",
        ])  # fmt: skip
    head = [*(short[key] for key in keys), "state", "steps", "parameters", "FLOPs", "time", "disk"]
    lines = format_table(head, rows, left=len(keys) + 1, width=terminal_width())
    estimates = [run.estimate for run in planned if run.estimate is not None]
    summary = f"{_count(len(planned), 'run')} in {sweep.folder}"
    if estimates:
        flops = [estimate.flops for estimate in estimates if estimate.flops is not None]
        summary += f": {format_seconds(sum(e.seconds for e in estimates))} one after the other"
        summary += f", {sum(flops):.2e} FLOPs" if flops else ""
        summary += f", {format_bytes(sum(e.disk for e in estimates))} of checkpoints"
        summary += "; times are of one process here, without evaluations, from one step of each model"
    return [*lines, "", summary, "nothing was started (--dry-run)"]


def _shown(setting: Setting) -> str:
    text = setting.text
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
