"""Does an evaluation read a number that evaluations before it have left in the task, as the best so far?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from unisono.runtime.text import join_names
from unisono.task import Task

_TRIALS = 4  # of other weights, which may be better or worse: the best so far shows only if one is better


def read_numbers(task: Task) -> dict[str, float]:
    """The numbers that a task keeps, by attribute."""
    return {n: v for n, v in vars(task).items() if isinstance(v, int | float) and not isinstance(v, bool)}


def find_kept_number(
    task: Task,
    evaluate: Callable[[], Mapping[str, float]],
    evaluate_others: Callable[[int], object],
    before: Mapping[str, float],
    values: Mapping[str, float],
) -> tuple[str, dict[str, float]]:
    """Which numbers evaluations leave and read, and what one comes to after an evaluation of other weights.

    Two evaluations of the same weights do not show the best of all so far. Only what an evaluation has left is tried:
    with any other number a right one may fail or come to something else.

    Args:
        task: that has been evaluated; its numbers are put back.
        evaluate: evaluates it once more.
        evaluate_others: evaluates other weights, by their number, and puts those of `evaluate` back.
        before: its numbers before any evaluation.
        values: of an evaluation.

    Returns:
        The numbers that evaluations leave; empty if they come to the same with them.
    """
    kept = read_numbers(task)
    changed = [name for name, number in kept.items() if name not in before or number != before[name]]
    try:
        for number in range(_TRIALS if changed else 0):
            _put_back(task, changed, before)
            try:
                evaluate_others(number)
                made = dict(evaluate())
            except Exception:  # lists beside these numbers are not put back: a run would not have come to this
                continue
            if made != dict(values):
                return join_names(f"self.{name}" for name in changed), made
    finally:
        _put_back(task, changed, kept)
    return "", {}


def _put_back(task: Task, names: Iterable[str], numbers: Mapping[str, float]) -> None:
    for name in names:
        if name in numbers:
            setattr(task, name, numbers[name])
        else:
            vars(task).pop(name, None)
