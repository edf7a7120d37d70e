"""What a trace says of the time between steps: how long the device computes nothing from one step to the next.

A step's work belongs to the step that launched it, however late it runs: a kernel by the call with its correlation, on
a CPU an operator by itself. Copies are no work, so a batch that is copied only when its step begins shows as a gap.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from unisono.engines.protocol import TRACE_PREFIX

KERNELS = ("kernel", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


def between_steps(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The median gap between two steps, in milliseconds, and the share of all steps in which nothing is computed.

    Raises:
        ValueError: for a trace of fewer than two steps with work.
    """
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = sorted(
        _span(event) for event in spans
        if event.get("cat") == "user_annotation" and event["name"] == f"{TRACE_PREFIX}step"
    )  # fmt: skip
    launches = [event for event in spans if event.get("cat") in LAUNCHES and _correlation(event) is not None]
    launched = {_correlation(event): float(event["ts"]) for event in launches}
    kernels = [event for event in spans if event.get("cat") in KERNELS]
    work = kernels or [event for event in spans if event.get("cat") == "cpu_op"]
    of_step: list[list[tuple[float, float]]] = [[] for _ in steps]
    for event in work:
        begun = launched.get(_correlation(event)) if kernels else float(event["ts"])
        number = -1 if begun is None else bisect_right(steps, (begun, float("inf"))) - 1
        if begun is not None and number >= 0 and begun < steps[number][1]:
            of_step[number].append(_span(event))
    if len(steps) < 2 or not all(of_step):
        raise ValueError(f"a trace of {len(steps)} steps, of which {sum(map(bool, of_step))} have work")
    gaps = [max(0.0, min(after)[0] - max(end for _, end in before)) for before, after in pairwise(of_step)]
    busy = _merge(span for spans_of_one in of_step for span in spans_of_one)
    whole = busy[-1][1] - busy[0][0]
    idle = 1 - sum(end - begin for begin, end in busy) / whole
    return {"gap between steps, ms": statistics.median(gaps) / 1e3, "idle": idle}


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _merge(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same instants, in spans that do not touch each other."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
