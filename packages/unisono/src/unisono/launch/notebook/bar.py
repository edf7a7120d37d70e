"""A run that is trained below a cell: several processes have a bar there, as one has."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from unisono.config.resolved_run import ResolvedRun
from unisono.launch.processes.local_processes import environment_changed
from unisono.observe import events
from unisono.runtime.display import notebook
from unisono.runtime.text import format_count
from unisono.supervise import run_facts, run_status

_POLL = 0.3  # seconds between looks at what the processes have recorded
_HIDDEN = ("step", "loss", "seconds", "data_wait", "grad_norm", "clip_norm", "flops", "memory_gb")


@contextmanager
def show_run(run: ResolvedRun) -> Iterator[None]:
    """Show the run of several processes below the cell of a notebook; elsewhere, do nothing."""
    shown = notebook.in_notebook() and run.world_size > 1 and run.config.observe.progress is True
    with _follow(run) if shown else nullcontext():
        yield


@contextmanager
def _follow(run: ResolvedRun) -> Iterator[None]:
    """Show the steps that other processes record, and set the variable by which rank 0 prints none."""
    from unisono.observe.progress import FOLLOWED_VARIABLE  # which imports rich

    done = threading.Event()
    thread = threading.Thread(target=_draw, args=(run, done), name="unisono-notebook-bar", daemon=True)
    thread.start()
    try:
        with environment_changed({FOLLOWED_VARIABLE: "1"}):
            yield
    finally:
        done.set()
        thread.join()


def _draw(run: ResolvedRun, done: threading.Event) -> None:
    """Show new steps and evaluations until the run is done, and what it came to."""
    from unisono.observe.notebook_progress import NotebookProgress
    from unisono.observe.progress import format_time_left

    first, shown, evaluated = run.resume.step if run.resume else 0, -1, -1
    bar: NotebookProgress | None = None
    while True:
        is_last = done.wait(_POLL)
        seen = [event for event in run_status.read_tail(run.directory)[0] if event["step"] >= first]
        steps = events.step_events(seen)
        total = run_facts.planned_steps(run.directory)
        if total and bar is None:
            bar = NotebookProgress(total)
        if bar is not None:
            for event in seen:
                if event.get("eval") and event["step"] > evaluated:
                    evaluated = event["step"]
                    bar.show_evaluation(evaluated, events.last_evaluation([event]))
            if steps and (newest := steps[-1])["step"] != shown and newest["step"] > first:
                shown = newest["step"]
                recent = [event["seconds"] for event in steps[-20:] if isinstance(event.get("seconds"), float)]
                left = (total or shown) - shown
                clock = format_time_left(left * sum(recent) / len(recent)) if recent else ""
                bar.show_step(shown, _format_values(newest), clock)
        if is_last:
            if bar is not None:
                bar.stop()
            return


def _format_values(event: Mapping[str, Any]) -> list[str]:
    """What a recorded step came to, as rank 0 would show it."""
    values = ["loss not finite" if event["loss"] is None else f"loss {event['loss']:.4f}"]
    for name, value in event.items():
        if not isinstance(value, int | float) or name in _HIDDEN:
            continue
        unit = name.removesuffix("_per_second")
        values.append(f"{name} {value:.4g}" if unit == name else f"{format_count(value)} {unit}/s")
    return values
