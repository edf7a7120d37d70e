"""Ctrl-C in a terminal, and the interrupt of a notebook's kernel: the run saves and stops after its step.

The stop is asked for as `unisono stop` does, so one process and several end alike. A second interrupt ends the run at
once, and so does the first one where this start has not completed a step: there is nothing to save. Without a terminal
(a batch job, `timeout --signal=INT`), an interrupt ends the run at once: whoever sends it may kill soon afterwards, and
SIGTERM is there for a save.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from unisono.config.resolved_run import ResolvedRun
from unisono.observe import events
from unisono.runtime.console import say
from unisono.runtime.display import notebook
from unisono.runtime.errors import Interrupted
from unisono.runtime.untrusted import safe_writing
from unisono.supervise import run_status
from unisono.supervise.step_sync import STOP


@contextmanager
def stop_on_interrupt(run: ResolvedRun) -> Iterator[None]:
    """Turn the first interrupt after a step of this start into a request to save and stop.

    Raises:
        Interrupted: In a terminal, after the run has stopped: what follows in a shell or a script was interrupted too.
    """
    in_notebook = notebook.in_notebook()
    is_interactive = in_notebook or (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty())
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_interactive or not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_stopping = False
    found = _newest_event(run)  # a start that crashed may have left steps after its last checkpoint

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        now = _newest_event(run)
        if is_stopping or now == found or now[0] <= (run.resume.step if run.resume else 0):
            raise KeyboardInterrupt
        is_stopping = True
        with suppress(FileExistsError):
            safe_writing.create_inside(run.directory, STOP)
        text = "interrupted: the run saves and stops after this step; interrupt again to end it at once"
        threading.Thread(target=say, args=(text,)).start()  # what is interrupted may be printing

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    # A run that was at its end anyhow has finished.
    if is_stopping and not in_notebook and run_status.read_status(run.directory).state != "finished":
        raise Interrupted("interrupted, and saved")


def _newest_event(run: ResolvedRun) -> tuple[int, float]:
    """The newest step in a run's event log, 0 if there is none, and when something was last recorded."""
    seen, written = run_status.read_tail(run.directory)
    steps = events.step_events(seen)
    return (int(steps[-1]["step"]) if steps else 0), written
