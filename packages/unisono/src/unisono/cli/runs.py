"""The verbs on runs as such: `unisono resume RUN`, `list`, `watch` and `clean`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments
from unisono.config import CONFIG_FILE
from unisono.runtime.console import say, terminal_width
from unisono.runtime.display import text_table
from unisono.runtime.text import format_bytes

if TYPE_CHECKING:
    from unisono.checkpoint.core.leftovers import Leftover
    from unisono.supervise.run_status import RunStatus

RESUME = "resume a run from its newest checkpoint, with its own configuration"
LIST = "list the runs in a folder: state, step, loss, age, size and where they run"
WATCH = "follow a run that trains, from another terminal or host"
CLEAN = "remove what runs do not need; says what would be freed, and asks"
_POLL = 0.5  # seconds between looks at a run that is watched
_WARNING = "only runs of yours, unless --trust is given, since its configuration decides what is read and written"


def add_verbs(verbs: Any) -> None:
    """Put the verbs among the others."""
    verb = verbs.add_parser("resume", help=RESUME, description=f"{RESUME}; {_WARNING}")
    arguments.add_run(verb)
    verb.add_argument("--trust", action="store_true", help="resume a run that you did not make: runs its author's code")
    arguments.add_overrides(verb, "settings that change, e.g. layout.world_size=4")
    verb = verbs.add_parser("list", help=LIST, description=LIST)
    verb.add_argument("folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help="default: runs")
    verb.set_defaults(run=_list)
    verb = verbs.add_parser("watch", help=WATCH, description=WATCH)
    arguments.add_run(verb)
    verb.set_defaults(run=_watch)
    text = "; never touches a run that trains, nor its newest and best checkpoint"
    verb = verbs.add_parser("clean", help=CLEAN, description=f"{CLEAN}{text}")
    verb.add_argument(
        "folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help="of a run, or of runs"
    )
    verb.add_argument("--keep", type=int, metavar="N", help="also remove all but the N newest checkpoints of each run")
    verb.add_argument("--yes", action="store_true", help="do not ask")
    verb.set_defaults(run=_clean)


def report_finished(folder: Path, steps: int) -> None:
    """Say that there is nothing to resume, and how to extend the run, or that it cannot be since nothing is left."""
    from unisono.checkpoint.core import commit, placement
    from unisono.runtime.errors import RunError

    done = f"{folder} is finished, after step {steps}"
    try:
        if not commit.find_checkpoints(folder / placement.NAME):
            placement.refuse_lost(folder)
    except RunError as error:
        say(done)
        say(f"unisono: WARNING: {error}", error=True)
        return
    say(f"{done}. To extend it: unisono resume {folder} {longer(folder, steps)}")


def longer(folder: Path, steps: int) -> str:
    """The words that make a finished run twice as long.

    Of a run in epochs the last batch was short, and stays so; a schedule that ends with the run would be another one.
    """
    from pydantic import TypeAdapter

    from unisono.config.code import foreign_run
    from unisono.config.schema.schedules import Schedule
    from unisono.optim.schedules import first_change

    values = foreign_run.read_values(folder / CONFIG_FILE)
    if (epochs := values["train"]["epochs"]) is not None:
        return f"train.epochs={2 * epochs:g} 'run.allow_change=[train.epochs]'"
    schedules = TypeAdapter(dict[str, Schedule]).validate_python(values["schedules"])
    changes = [first_change(schedule, steps, 2 * steps) for schedule in schedules.values()]
    more = " 'run.allow_change=[train.steps]'" if any(first is not None and first < steps for first in changes) else ""
    return f"train.steps={2 * steps}{more}"


def _list(parsed: argparse.Namespace) -> int:
    from unisono.supervise import run_status

    found = run_status.find_runs(parsed.folder)
    statuses = sorted((run_status.read_status(run) for run in found), key=lambda status: status.age)
    if not statuses:
        say(f"there are no runs in {parsed.folder}")
    else:
        say("\n".join(format_table(statuses, terminal_width())))
    return 0


def format_table(statuses: Sequence[RunStatus], width: int | None = None) -> list[str]:
    """Format runs as a table for a terminal of `width`, a line each; names stay whole, since they are typed."""
    from unisono.supervise.run_status import measure_size

    head = ("run", "state", "step", "loss", "age", "size", "where")
    rows = list[tuple[str, ...]]()
    for status in statuses:
        loss = "–" if status.loss is None else f"{status.loss:.4f}"
        size = format_bytes(measure_size(status.folder))
        rows.append(
            (str(status.folder), status.outcome, status.progress, loss, _format_age(status.age), size, status.place)
        )
    shown = len(head) if any(row[-1] for row in rows) else len(head) - 1  # nothing trains
    return text_table.format_table(head[:shown], [row[:shown] for row in rows], left="<<>>>><", width=width)


def _watch(parsed: argparse.Namespace) -> int:
    from unisono.runtime.errors import RunError
    from unisono.supervise import run_status

    if not run_status.is_run(parsed.folder):
        raise RunError(f"{parsed.folder} is not a run directory (no config.yaml)")
    for line in follow_run(parsed.folder):
        say(line)
    return 0


def follow_run(folder: Path) -> Iterator[str]:
    """Yield a line for the newest step whenever there is one, and for each evaluation, until the run ends."""
    from unisono.supervise import run_status

    shown_step, shown_evaluation = 0, -1
    while True:
        status = run_status.read_status(folder)  # before the events: what is written after it belongs to the next look
        seen, _ = run_status.read_tail(folder)
        if status.step < shown_step:  # resumed from an earlier checkpoint: its steps come again
            shown_step, shown_evaluation = 0, -1
        evaluations = [event for event in seen if event.get("eval") and event["step"] > shown_evaluation]
        if status.step > shown_step:
            yield f"{status.folder}: {_format_step(status, seen)}"
            shown_step = status.step
        for event in evaluations if shown_evaluation >= 0 else evaluations[-1:]:
            yield f"{status.folder}: eval after step {event['step']}: {_format_numbers(event)}"
        shown_evaluation = max([shown_evaluation, 0, *(event["step"] for event in evaluations)])
        if not status.is_running:
            how = f"{status.folder}: {status.outcome} after step {status.progress}"
            yield how if status.state == "finished" else f"{how}; unisono diagnose {status.folder} says why"
            return
        time.sleep(_POLL)


def _format_step(status: RunStatus, seen: Sequence[dict[str, Any]]) -> str:
    from unisono.observe import events

    parts = [f"step {status.progress}", f"loss {'not finite' if status.loss is None else f'{status.loss:.4f}'}"]
    recent = [event["seconds"] for event in events.step_events(seen)[-20:] if isinstance(event.get("seconds"), float)]
    if recent and status.total:
        parts.append(f"about {_format_age(sum(recent) / len(recent) * (status.total - status.step))} to go")
    return "  ".join(parts)


def _format_numbers(event: dict[str, Any]) -> str:
    known = ("step", "eval", "rows", "seconds")
    numbers = {name: value for name, value in event.items() if name not in known and isinstance(value, int | float)}
    return ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())


def _clean(parsed: argparse.Namespace) -> int:
    from unisono.checkpoint.core import leftovers
    from unisono.runtime.errors import ConfigError, RunError
    from unisono.supervise import run_lock, run_status

    if parsed.keep is not None and parsed.keep < 1:
        raise ConfigError(f"--keep {parsed.keep}: at least the newest checkpoint is kept")
    found: dict[Path, list[Leftover]] = {}
    for run in run_status.find_runs(parsed.folder):
        if run_lock.find_holder(run) is not None:
            if run == parsed.folder:
                raise RunError(f"{run} is training, and nothing of it was removed; stop it, or wait for its end")
            say(f"{run} is training and is left as it is")
            continue
        try:
            inside = leftovers.find_leftovers(run, parsed.keep)
        except (ConfigError, RunError) as error:  # the others are cleaned
            if run == parsed.folder:
                raise
            say(f"{run} is left as it is: {error}", error=True)
            continue
        if inside:
            found[run] = inside
    sizes = {one: run_status.measure_size(one.path) for inside in found.values() for one in inside}
    if not found:
        say(f"there is nothing to remove in {parsed.folder}")
        return 0
    for one, size in sizes.items():
        say(f"  {format_bytes(size):>8}  {one.path}  ({one.reason})")
    say(f"{len(sizes)} {'entry' if len(sizes) == 1 else 'entries'}, {format_bytes(sum(sizes.values()))} in all")
    if not parsed.yes and not _confirm():
        say("nothing was removed")
        return 0
    removed, freed = 0, 0
    for run, inside in found.items():
        try:
            with run_lock.hold_lock(run):
                for one in inside:
                    leftovers.remove(one)
                    removed, freed = removed + 1, freed + sizes[one]
        except (OSError, RunError) as error:  # of another user, or started meanwhile
            if run == parsed.folder:
                raise RunError(f"{run} could not be cleaned: {error}") from error
            say(f"{run} is left as it is: {error}", error=True)
    say(f"removed; {format_bytes(freed)} are free" if removed else "nothing was removed")
    return 0 if removed else RunError.exit_code


def _confirm() -> bool:
    from unisono.runtime.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError("nothing was removed: there is no terminal to ask on; add --yes to remove it")
    say("Remove it? [y/N]")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _format_age(seconds: float) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
