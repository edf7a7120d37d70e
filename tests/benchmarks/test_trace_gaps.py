"""Gaps between steps in a trace: the device's own time counts, not that of the process which launches its work."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.trace_gaps import between_steps


def event(category: str, name: str, begin: float, end: float, correlation: int | None = None) -> dict[str, Any]:
    """Milliseconds in; a trace has microseconds."""
    made = {"ph": "X", "cat": category, "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3}
    return made if correlation is None else {**made, "args": {"correlation": correlation}}


def step(begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", "unisono/step", begin, end)


def kernel(launched: float, begin: float, end: float, number: int) -> list[dict[str, Any]]:
    return [
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 0.01, number),
        event("kernel", "gemm", begin, end, number),
    ]


def test_a_kernel_belongs_to_the_step_that_launched_it_however_late_it_runs() -> None:
    found = between_steps([step(0, 10), step(11, 20), *kernel(1, 2, 14, 1), *kernel(12, 14, 30, 2)])
    assert found == {"gap between steps, ms": 0.0, "idle": pytest.approx(0.0)}


def test_a_copy_that_the_next_step_waits_for_is_a_gap_and_one_made_ahead_is_none() -> None:
    steps = [step(0, 10), step(11, 20)]
    copy = event("gpu_memcpy", "Memcpy HtoD", 10, 13)
    found = between_steps([*steps, *kernel(1, 2, 10, 1), copy, *kernel(12, 13, 18, 2)])
    assert found == {"gap between steps, ms": pytest.approx(3.0), "idle": pytest.approx(3 / 16)}
    ahead = between_steps([*steps, *kernel(1, 2, 13, 1), copy, *kernel(12, 13, 18, 2)])
    assert ahead["gap between steps, ms"] == 0


def test_idle_time_within_a_step_is_no_gap_between_steps_but_is_idle() -> None:
    one = [*kernel(1, 0, 4, 1), *kernel(2, 6, 10, 2)]
    found = between_steps([step(0, 5), step(8, 20), *one, *kernel(9, 10, 20, 3)])
    assert found == {"gap between steps, ms": 0.0, "idle": pytest.approx(2 / 20)}


def test_on_a_cpu_operators_are_the_work_nested_ones_once() -> None:
    operators = [event("cpu_op", "aten::linear", 1, 9), event("cpu_op", "aten::mm", 2, 8), event("cpu_op", "a", 12, 19)]
    found = between_steps([step(0, 10), step(11, 20), *operators, event("cpu_op", "aten::copy_", 10.2, 10.5)])
    assert found == {"gap between steps, ms": pytest.approx(3.0), "idle": pytest.approx(3 / 18)}


def test_a_trace_without_the_work_of_each_step_says_so() -> None:
    with pytest.raises(ValueError, match="a trace of 2 steps, of which 1 have work"):
        between_steps([step(0, 10), step(11, 20), *kernel(1, 2, 14, 1)])
