"""The word `launcher=`: a command runs where a launcher puts it, e.g. as a job of a cluster, and is followed from here.

    unisono train language run.name=mine launcher=slurm time=8h partition=gpu gpus=4

The same command finds the job again: its name is `run.name`, or made from the words. A run that is given no name gets
that one, so that a job that is started again resumes it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli import arguments
from unisono.runtime.console import clean, say
from unisono.runtime.untrusted import safe_paths

if TYPE_CHECKING:
    import argparse

    from unisono.launch.launcher import Ended, Job, Launcher

FOLDER = "launched"  # under run.dir: what commands printed elsewhere
_KEY = "launcher"
_VERBS = ("train", "prove", "data prepare")


def take_word(parsed: argparse.Namespace, words: Sequence[str]) -> str | None:
    """Take the launcher out of a command that may have one; None if it runs here."""
    if not " ".join(words[:2]).startswith(_VERBS):
        return None
    named = [word.partition("=")[2] for word in parsed.overrides if word.startswith(f"{_KEY}=")]
    parsed.overrides = [word for word in parsed.overrides if not word.startswith(f"{_KEY}=")]
    return named[-1] if named and named[-1] != "local" else None


def read_launcher(name: str, words: Sequence[str]) -> tuple[Launcher, list[str]]:
    """A launcher with its settings among the words, and the other words.

    Raises:
        ConfigError: If no installed package has it, or a setting does not fit.
    """
    from unisono.config.key_values import split_words, validate_words
    from unisono.launch.launcher import find_launcher

    kind = find_launcher(name)
    own, rest = split_words(words, kind.Settings)
    launcher: Launcher = kind(validate_words(own, kind.Settings))
    return launcher, rest


def launch(name: str, parsed: argparse.Namespace, words: Sequence[str]) -> int:
    """Let a launcher run a command, show what it prints, and return its exit code.

    Args:
        name: Of the launcher.
        parsed: The command.
        words: The same, as typed.

    Raises:
        UnisonoError: For what the user can fix, before anything is submitted.
    """
    from unisono.config.key_values import split_words
    from unisono.launch import run_directory
    from unisono.launch.launcher import Job, describe_job, resolve_layout

    launcher, rest = read_launcher(name, [word for word in words if not word.startswith(f"{_KEY}=")])
    place = next((Path(word.partition("=")[2]) for word in rest if word.startswith("run.dir=")), Path("runs"))
    own = next((word.partition("=")[2] for word in rest if word.startswith("run.name=")), None)
    digest = hashlib.sha256(json.dumps(rest).encode()).hexdigest()[:8]
    title = f"{Path(parsed.recipe.partition(':')[0]).stem}-{digest}"
    job_name = own or (title if parsed.verb == "train" else f"{parsed.verb}-{title}")
    console = place / FOLDER / f"{job_name}.log"
    if parsed.verb == "train":
        rest += [] if own else [f"run.name={job_name}"]
        _, parsed.overrides = split_words(parsed.overrides, type(launcher).Settings)
        parsed.overrides += [] if own else [f"run.name={job_name}"]
        config = resolve_layout(arguments.load_config(parsed), launcher.processes())
        run_directory.refuse_unusable(config)
        job = describe_job(job_name, _command(rest), config, console)
    else:
        job = Job(job_name, _command(rest), place / job_name, console)
    launcher.check([job])
    return _follow(launcher, job)


def _command(words: Sequence[str]) -> tuple[str, ...]:
    return (sys.executable, "-m", "unisono", *words)


def _follow(launcher: Launcher, job: Job) -> int:
    """Run a job to its end, and print what it prints; returns its exit code."""
    outcome: list[Ended] = []
    known = launcher.under_way(job.console.parent).get(job.name)
    shown = job.console.stat().st_size if job.console.is_file() and known is None else 0

    def show(_: Job) -> bool:
        nonlocal shown
        if job.console.is_file():
            with safe_paths.open_inside(job.console.parent, job.console.name) as file:
                file.seek(shown)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]  # a line that is not complete is shown with its end
            shown += len(whole)
            for line in whole.decode("utf-8", errors="replace").splitlines():
                say(clean(line))
        return False

    job.console.parent.mkdir(parents=True, exist_ok=True)
    launcher.run(
        [job], lambda _: say(f"{job.name}: {known or launcher.begins}"), lambda _, how: outcome.append(how), show
    )
    show(job)
    if not outcome:  # a launcher that only writes what another program starts
        return 0
    (how,) = outcome
    if how.code:
        say(f"{job.name}: exit code {how.code}: {how.why}; all that it printed is in {job.console}", error=True)
    return how.code
