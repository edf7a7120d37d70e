"""Where the time of a few steps goes: a trace for a viewer, and a table whose parts add up to the step.

Every instant of a step belongs to one part. On the CPU it is the innermost part that the process is in, except during
the forward or backward pass while a collective is running and no operation of the model is: that is time lost to the
reduction. On an accelerator the device's activity comes first: compute, then an exposed collective, then an exposed
copy; while it is idle, the process's own part counts, since the device is waiting for it.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from unisono.engines.protocol import TRACE_PREFIX, Engine
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths

log = logging.getLogger(__name__)

PARTS = ("data", "transfer", "forward", "backward", "reduction", "optimizer", "other")
_STEP = f"{TRACE_PREFIX}step"
_COLLECTIVES = ("gloo:", "nccl:", "rccl:", "xccl:", "ccl:", "mpi:", "ncclDevKernel", "ncclKernel", "oneccl")
Span = tuple[float, float]  # begin, end; microseconds
Named = tuple[float, float, str]


class Profile:
    """Records the steps selected by `observe.profile` on every rank; the call after the last of them is collective.

    Args:
        steps: First and last, from 1; None for no profile.
        engine: Whose profiler is used.
        folder: Of the run; traces and tables go to `profile/`.
        first: Steps done before this start.
        total: Steps in the run.
        say: Prints a line for the user.
    """

    def __init__(
        self, steps: tuple[int, int] | None, engine: Engine, folder: Path, first: int, total: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._engine, self._folder, self._say = engine, folder / "profile", say
        self._steps = None if steps is None else (max(steps[0], first + 1), min(steps[1], total))
        if self._steps is not None and self._steps[0] > self._steps[1]:
            assert steps is not None
            say(f"observe.profile={list(steps)}: none of these steps is still to come, so nothing is profiled")
            self._steps = None
        self._running = False

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            self._engine.profiler.stop(None)

    def step(self) -> AbstractContextManager[Any]:
        """Return the context of one step, from the wait for its data to its update."""
        return self._engine.profiler.part("step") if self._running else nullcontext()

    def start_or_stop(self, made: int) -> None:
        """Start or stop profiling between steps, after `made` steps."""
        if self._steps is None:
            return
        if made + 1 == self._steps[0]:
            self._engine.profiler.start()
            self._running = True
        elif made == self._steps[1]:
            self._finish(self._steps)

    def _finish(self, steps: tuple[int, int]) -> None:
        group = self._engine.communicator
        path = self._folder / f"rank-{group.rank:05d}.trace.json.gz"
        self._running, self._steps = False, None
        fault, own = None, {}
        try:
            self._engine.profiler.stop(path)
            own = breakdown(read_trace(path))
        except (OSError, ValueError) as error:  # a full disk should not end a run
            fault = f"{type(error).__name__}: {error}"
        everyone = group.gather([fault, own], "the profiles of all ranks")
        faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(everyone) if fault]
        if faults:
            log.warning("the profile could not be written (%s); the run continues", "; ".join(faults))
            return
        if group.rank == 0:
            ranks = [parts for _, parts in everyone]
            lines = format_table(ranks, steps)
            described = {"steps": list(steps), "unit": "ms per step", "ranks": ranks}
            try:
                write_whole(self._folder / "table.json", json.dumps(described, indent=1) + "\n")
                write_whole(self._folder / "table.txt", "\n".join(lines) + "\n")
            except OSError as error:
                log.warning("the profile's table could not be written (%s); the run continues", error)
            for line in (*lines, f"profile: {self._folder} (open the traces in https://ui.perfetto.dev)"):
                self._say(line)


def format_table(ranks: Sequence[Mapping[str, float]], steps: tuple[int, int]) -> list[str]:
    """Format the milliseconds per step of each part on each rank, and its share."""
    first, last = steps
    names = [f"rank {rank}" for rank in range(len(ranks))]
    lines = [f"where the time goes, ms per step (steps {first} to {last})", "".join([" " * 10, *map(_cell, names)])]
    for part in (*PARTS, "step"):
        cells = [f"{parts[part]:.2f} {100 * parts[part] / max(parts['step'], 1e-9):3.0f} %" for parts in ranks]
        lines.append("".join([f"{part:<10}", *map(_cell, cells)]))
    return lines


def _cell(text: str) -> str:
    return f"{text:>18}"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a gzipped Chrome trace."""
    with (
        safe_paths.open_regular(path) as packed,
        gzip.open(packed, "rt", encoding="utf-8", errors="replace") as file,
    ):
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def breakdown(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the milliseconds per step of each of `PARTS`, which add up to `step`, averaged over a trace's steps.

    Raises:
        ValueError: If the trace has no step.
    """
    own: list[Named] = []
    on_device: dict[Any, list[Named]] = {}
    kernels: list[tuple[Any, Span, bool]] = []
    copies: list[Span] = []
    operations: list[Span] = []
    collectives: list[Span] = []
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        name, category = str(event.get("name", "")), str(event.get("cat", ""))
        span = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        collective = any(mark in name for mark in _COLLECTIVES)
        if category == "user_annotation" and name.startswith(TRACE_PREFIX):
            own.append((*span, name))
        elif category == "gpu_user_annotation" and name.startswith(TRACE_PREFIX):
            on_device.setdefault(event.get("tid"), []).append((*span, name))
        elif category in ("kernel", "gpu_memset"):
            kernels.append((event.get("tid"), span, collective))
        elif category == "gpu_memcpy":
            copies.append(span)
        elif collective:
            collectives.append(span)
        elif category == "cpu_op" and not name.startswith(("c10d::", "record_param_comms", "c10::")):
            operations.append(span)
    steps = [(begin, end) for begin, end, name in own if name == _STEP]
    if not steps:
        raise ValueError("the trace has no step")
    inner = [part for part in own if part[2] != _STEP]
    layers: list[Sequence[Named]] = [  # the first layer that is active at an instant decides
        [(*span, _innermost(on_device.get(tid, []), span[0])) for tid, span, collective in kernels if not collective],
        [(*span, "reduction") for _, span, collective in kernels if collective],
        [(*span, "transfer") for span in copies],
    ]
    total = dict.fromkeys((*PARTS, "step"), 0.0)
    for begin, end in steps:
        total["step"] += end - begin
        for part, seconds in _divide_step((begin, end), layers, inner, operations, collectives).items():
            total[part] += seconds
    return {part: value / 1e3 / len(steps) for part, value in total.items()}


def _divide_step(
    step: Span,
    layers: Sequence[Sequence[Named]],
    inner: Sequence[Named],
    operations: Sequence[Span],
    collectives: Sequence[Span],
) -> dict[str, float]:
    """Divide the instants of one step among its parts; nothing changes between two consecutive marks."""
    marks: list[tuple[float, int, int, Any]] = []  # time, layer, +1 or -1, what

    def mark(layer: int, begin: float, end: float, what: Any) -> None:
        if end > step[0] and begin < step[1] and end > begin:
            marks.append((max(begin, step[0]), layer, 1, what))
            marks.append((min(end, step[1]), layer, -1, what))

    for number, spans in enumerate(layers):
        for begin, end, name in spans:
            mark(number, begin, end, name)
    host = len(layers)  # above it come the operations and the collectives
    for begin, end, name in inner:
        mark(host, begin, end, (begin, name.removeprefix(TRACE_PREFIX)))
    for number, plain in enumerate((operations, collectives), start=host + 1):
        for begin, end in plain:
            mark(number, begin, end, "")
    active: list[dict[Any, int]] = [{} for _ in range(len(layers) + 3)]
    shares = dict.fromkeys(PARTS, 0.0)
    now = step[0]
    for when, layer, change, what in sorted(marks, key=lambda entry: entry[0]):
        if when > now:
            shares[_part_at(active, len(layers))] += when - now
            now = when
        active[layer][what] = active[layer].get(what, 0) + change
        if not active[layer][what]:
            del active[layer][what]
    shares[_part_at(active, len(layers))] += step[1] - now
    return shares


def _part_at(active: Sequence[Mapping[Any, int]], host: int) -> str:
    for layer in active[:host]:
        if layer:
            return _part_name(next(iter(layer)))
    inside = max(active[host])[1] if active[host] else "other"  # the most recently started
    if inside in ("forward", "backward") and active[host + 2] and not active[host + 1]:
        return "reduction"
    return _part_name(inside)


def _part_name(name: str) -> str:
    return name if name in PARTS else "other"


def _innermost(parts: Sequence[Named], when: float) -> str:
    inside = [(begin, name) for begin, end, name in parts if begin <= when < end and name != _STEP]
    return max(inside)[1].removeprefix(TRACE_PREFIX) if inside else "other"
