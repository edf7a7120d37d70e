"""Explains what is saved when a run ends early, and gives the exact command that resumes it.

Nothing is promised unchecked: if there is no checkpoint, the message says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from unisono.checkpoint.core import commit, placement, resume_point
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.remote import restore
from unisono.config.resolved_run import ResolvedRun
from unisono.launch.resolving import resolve
from unisono.observe import events
from unisono.runtime.errors import (
    CheckpointError,
    Interrupted,
    MemoryExhaustedError,
    Preempted,
    UnavailableError,
    UnisonoError,
)


@contextmanager
def explain_exit(run: ResolvedRun, launcher: str = "unisono") -> Iterator[None]:
    """Extend any error that ends the run with what is saved and how to resume.

    A run that is refused before its first step only gives the reason: the same command would be refused again.

    Raises:
        Interrupted: Instead of a KeyboardInterrupt.
    """
    try:
        yield
    except Interrupted:  # after it was saved, which the run has said
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted. {resume_advice(run, launcher)}") from error
    except UnisonoError as error:
        if error.exit_code == Preempted.exit_code:  # its own message says what is saved
            verb = "Resume"
            with suppress(UnavailableError):
                if _newest_checkpoint(run) is None:
                    verb = "Start over"
            error.args = (f"{error}. {_format_command(verb, run, launcher)}",)
        elif isinstance(error, MemoryExhaustedError):
            error.args = (f"{error}\n{out_of_memory_advice(run, error.random, launcher)}",)
        elif error.exit_code != MemoryExhaustedError.exit_code and _has_progressed(run):
            error.args = (f"{error}\n{resume_advice(run, launcher)}",)
        raise
    except Exception as error:
        if _has_progressed(run):
            error.add_note(resume_advice(run, launcher))
        raise


def resume_advice(run: ResolvedRun, launcher: str = "unisono") -> str:
    """Name the newest checkpoint and the command that resumes from it."""
    try:
        newest = _newest_checkpoint(run)
    except UnavailableError as error:  # of which nothing may be said but that
        return f"{error}. {_format_command('Resume', run, launcher)}"
    if newest is None:
        return f"There is no checkpoint yet. {_format_command('Start over', run, launcher)}"
    if newest.holds == "model":
        return f"The newest checkpoint (step {newest.step}) holds only the model, so the run cannot be resumed from it"
    if newest.step >= int(newest.state["total"]):
        return f"All {newest.step} steps were done before, and the newest checkpoint holds them; nothing is lost"
    return f"The newest checkpoint is from step {newest.step}. {_format_command('Resume', run, launcher)}"


def out_of_memory_advice(run: ResolvedRun, random: bool | None, launcher: str = "unisono") -> str:
    """Say what to do after a run has run out of memory.

    Args:
        run: As resolved.
        random: Whether its forward passes draw random numbers; None if unknown.
        launcher: What started the processes.
    """
    size = resolve.next_smaller_micro_batch(run)
    if size is None:
        return (
            "The micro-batch is already one row. Use layout.strategy=fsdp on more processes, "
            "layout.activation_checkpointing=1, or a smaller model"
        )
    changes: dict[str, str | None] = {"layout.micro_batch": str(size)}
    if run.config.layout.device == "cpu":  # where it is for `auto` alone
        changes["layout.max_memory_gb"] = None
    if resolve.draws_random_numbers(run, random) and "layout.micro_batch" not in run.config.run.allow_change:
        changes["run.allow_change"] = f"[{','.join([*run.config.run.allow_change, 'layout.micro_batch'])}]"
        return (
            "The forward pass draws random numbers or normalises rows together, so a smaller micro-batch changes the "
            f"results. {_format_command('To accept that, resume', run, launcher, changes)}"
        )
    return _format_command("Resume", run, launcher, changes)


def _newest_checkpoint(run: ResolvedRun) -> Checkpoint | None:
    """Return the newest checkpoint whose manifest is readable.

    Raises:
        UnavailableError: If that cannot be seen now.
    """
    try:
        if not run.config.launch.shared_folder and (parts := restore.find_partial(run.directory)):
            return commit.read_manifest(parts[-1])
        return resume_point.newest_readable(run.directory / placement.NAME).checkpoint
    except (CheckpointError, OSError):
        return None


def _has_progressed(run: ResolvedRun) -> bool:
    """Whether this start has completed a step, according to the event log."""
    try:
        steps = events.step_events(events.read_events(run.directory / "events.jsonl"))
    except (OSError, ValueError):
        return False
    return bool(steps) and int(steps[-1]["step"]) > (run.resume.step if run.resume else 0)


def _format_command(verb: str, run: ResolvedRun, launcher: str, changes: Mapping[str, str | None] | None = None) -> str:
    """Format `Resume with:` followed by the command on a line of its own."""
    under = f" (under {launcher}, as before)" if launcher not in ("unisono", "none") and run.command else ""
    return f"{verb}{under} with:\n  {run.resume_command(changes or {})}"
