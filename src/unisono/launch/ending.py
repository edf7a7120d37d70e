"""What a run says when it ends early: what is saved, and the exact command that resumes it.

Nothing is promised that was not looked at: where there is no checkpoint, that is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from unisono.checkpoint.core import resume_point
from unisono.config.resolved_run import ResolvedRun
from unisono.observe import events
from unisono.runtime.errors import CheckpointError, Interrupted, Preempted, UnisonoError


@contextmanager
def explained(run: ResolvedRun, launcher: str = "unisono") -> Iterator[None]:
    """While this lasts, whatever ends the run says what is saved and how to resume.

    A run that is refused before its first step says only why: the same command would be refused again.

    Args:
        run: as it was resolved.
        launcher: who started the processes.

    Raises:
        Interrupted: in place of a KeyboardInterrupt.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(f"interrupted. {advice(run, launcher)}") from error
    except UnisonoError as error:
        if isinstance(error, Preempted) or _has_progressed(run):
            _append(error, advice(run, launcher))
        raise
    except Exception as error:
        if _has_progressed(run):
            error.add_note(advice(run, launcher))
        raise


def advice(run: ResolvedRun, launcher: str = "unisono") -> str:
    """Which checkpoint is the newest, and the command that resumes from it.

    Args:
        run: as it was resolved.
        launcher: who started the processes.
    """
    under = f" (under {launcher}, as before)" if launcher not in ("unisono", "none") and run.command else ""
    try:
        newest = resume_point.newest_readable(run.directory / "checkpoints").checkpoint
    except (CheckpointError, OSError) as error:
        return f"Whether there is a checkpoint cannot be seen: {error}"
    if newest is None:
        return f"There is no checkpoint yet. Start over{under} with: {run.resumes_by}"
    if newest.holds == "model":
        return f"The newest checkpoint is of step {newest.step} and holds the model only, so it cannot be resumed"
    return f"The newest checkpoint is of step {newest.step}. Resume{under} with: {run.resumes_by}"


def _has_progressed(run: ResolvedRun) -> bool:
    """Whether this start has run a step, as far as its record says."""
    try:
        steps = events.steps(events.read(run.directory / "events.jsonl"))
    except (OSError, ValueError):
        return False
    return bool(steps) and int(steps[-1]["step"]) > (run.resume.step if run.resume else 0)


def _append(error: UnisonoError, text: str) -> None:
    """Put a sentence at the end of an error's, on a line of its own."""
    error.args = (f"{error}\n{text}",)
