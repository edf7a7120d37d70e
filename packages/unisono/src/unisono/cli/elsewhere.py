"""The word `launcher=`: a command runs where a launcher puts it, e.g. as a job of a cluster, and is followed from here.

    unisono train language run.name=mine launcher=slurm time=8h partition=gpu gpus=4

Its settings are checked here, before anything is submitted. The same command finds the job again: its name is
`run.name`, or made from the words. A run that is given no name gets that one, so that a job that is started again
resumes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.cli import arguments
from unisono.runtime.console import clean, say

if TYPE_CHECKING:
    from unisono.launch.launcher import Ended, Hosts, Job, Launcher

FOLDER = "launched"  # under run.dir: what commands printed elsewhere
HERE = "local"  # for a single command the same as none
_KEY = "launcher"
_VERBS = (["train"], ["prove"], ["data", "prepare"])


def find_word(words: Sequence[str]) -> str | None:
    """The launcher that a command names, if it is one that may run elsewhere; None if it names none."""
    if words[:1] not in _VERBS and words[:2] not in _VERBS:
        return None
    named = [word.partition("=")[2] for word in _split_arguments(words)[0] if word.startswith(f"{_KEY}=")]
    return named[-1] if named else None


def drop_word(words: Sequence[str]) -> list[str]:
    """A command without the name of its launcher."""
    own, given = _split_arguments(words)
    return [word for word in own if not word.startswith(f"{_KEY}=")] + given


def read_launcher(name: str, words: Sequence[str]) -> tuple[Launcher, list[str]]:
    """A launcher with its settings among the words, and the other words.

    Raises:
        ConfigError: If no installed package has it, or a setting does not fit.
    """
    from unisono.config.key_values import parse_settings
    from unisono.launch.launcher import find_launcher

    kind = find_launcher(name)
    settings, rest = parse_settings(words, kind.Settings)
    launcher: Launcher = kind(settings)
    return launcher, rest


def launch(name: str, words: Sequence[str], parse: Callable[[Sequence[str]], argparse.Namespace]) -> int:
    """Let a launcher run a command, show what it prints, and return its exit code.

    Args:
        name: Of the launcher.
        words: The command, as typed.
        parse: The command, of words without those of a launcher.

    Raises:
        UnisonoError: For what the user can fix, before anything is submitted.
    """
    import hashlib
    import json

    from unisono.cli import script

    own, given = _split_arguments(drop_word(words))
    launcher, rest = read_launcher(name, own)
    rest += given
    verb = " ".join(rest[:2] if rest[0] == "data" else rest[:1])
    is_script = script.is_proof_of_script(rest)
    parsed = argparse.Namespace(recipe=rest[1], overrides=[]) if is_script else parse(rest)
    ours = rest[: len(rest) - len(given)]
    place = next((Path(word.partition("=")[2]) for word in ours if word.startswith("run.dir=")), Path("runs"))
    title = f"{Path(parsed.recipe.partition(':')[0]).stem}-{hashlib.sha256(json.dumps(rest).encode()).hexdigest()[:8]}"
    if verb == "train":
        named = next((word.partition("=")[2] for word in rest if word.startswith("run.name=")), None)
        title = named or title
        rest += [] if named else [f"run.name={title}"]
        parsed.overrides += [] if named else [f"run.name={title}"]
    else:
        title = f"{rest[0]}-{title}"
    command = (sys.executable, "-m", "unisono", *rest)
    console = place / FOLDER / f"{title}.log"
    if is_script:
        job = _proof(title, command, place, console, script.count_processes(rest[1:]))
    elif verb == "train":
        job = _run(parsed, title, command, console, launcher.hosts())
    elif verb == "prove":
        job = _proof(title, command, place, console, _count_processes(parsed))
    else:
        job = _preparation(parsed, title, command, place, console)
    launcher.check([job])
    return follow(launcher, job)


def _split_arguments(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command, and those from `--` on, which are a script's own."""
    end = words.index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end:])


def _run(parsed: argparse.Namespace, name: str, command: Sequence[str], console: Path, hosts: Hosts | None) -> Job:
    from unisono.launch.launcher import describe_job, resolve_layout
    from unisono.launch.resolving import run_directory

    config = resolve_layout(arguments.load_config(parsed), hosts)
    run_directory.refuse_unusable(config)
    return describe_job(name, command, config, console)


def _proof(name: str, command: Sequence[str], place: Path, console: Path, processes: int) -> Job:
    from unisono.launch.launcher import Job

    return Job(
        name, tuple(command), place / name, console, processes,
        one_host="leave nodes= out: a proof starts all processes of its layouts there",
    )  # fmt: skip


def _count_processes(parsed: argparse.Namespace) -> int:
    """The most processes that any layout of a proof has; its settings are checked."""
    from unisono.proof.cases import ProofSettings, parse_layout

    if parsed.quick:
        from unisono.proof.cases import QUICK

        parsed.overrides = [*QUICK, *parsed.overrides]
    proof = arguments.parse_settings(parsed, ProofSettings)
    arguments.load_config(parsed)
    return 1 if proof.engines else max((parse_layout(layout)[0] for layout in proof.layouts), default=1)


def _preparation(parsed: argparse.Namespace, name: str, command: Sequence[str], place: Path, console: Path) -> Job:
    from dataclasses import replace

    from unisono.config.schema.verbs import Prepare
    from unisono.data.prepare.partitions import Partition
    from unisono.launch.launcher import Job

    own = arguments.parse_settings(parsed, Prepare)
    Partition.parse(own.shard)
    arguments.load_config(parsed)
    parts = "leave nodes= out, and start parts as jobs of their own: shard=1/2, shard=2/2, and then unisono data merge"
    job = Job(name, tuple(command), place / name, console, one_host=parts)
    return job if own.workers == "auto" else replace(job, workers=own.workers)


def follow(launcher: Launcher, job: Job) -> int:
    """Run a job to its end, and print what it prints; returns its exit code, or 0 if it is only written."""
    from unisono.runtime.untrusted import safe_paths

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
    if not launcher.waits:
        return 0
    (how,) = outcome
    if how.code:
        say(f"{job.name}: exit code {how.code}: {how.why}; all that it printed is in {job.console}", error=True)
    return how.code
