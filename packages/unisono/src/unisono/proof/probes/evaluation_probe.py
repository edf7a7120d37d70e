"""Does an evaluation read a number that evaluations before it have left in the task, as the best so far?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from unisono.task import Task


def read_numbers(task: Task) -> dict[str, float]:
    """The numbers that a task keeps, by attribute."""
    return {n: v for n, v in vars(task).items() if isinstance(v, int | float) and not isinstance(v, bool)}


def find_kept_number(
    task: Task, evaluate: Callable[[], Mapping[str, float]], before: Mapping[str, float], values: Mapping[str, float]
) -> tuple[str, dict[str, float]]:
    """Which number evaluations change and read, and what one comes to with another one in its place.

    Two evaluations of the same weights do not show the best of all so far. A number that is read and written once, such
    as a count that is kept, decides an evaluation as well, but evaluations do not change it any more.

    Args:
        task: that has been evaluated; its numbers are put back.
        evaluate: evaluates it once more.
        before: its numbers before any evaluation.
        values: of an evaluation.

    Returns:
        The attribute; empty if there is none.
    """
    for name, number in read_numbers(task).items():
        if name in before and number == before[name]:
            continue
        changes, differing = False, dict[str, float]()
        for other in (number + 1 + abs(number), number - 1 - abs(number)):
            setattr(task, name, other)
            try:
                made = dict(evaluate())
                changes |= getattr(task, name) != other
            except Exception:  # a place in a list, say, that is none now: no evaluation would have left it
                continue
            finally:
                setattr(task, name, number)
            differing = differing or (made if made != dict(values) else {})
        if changes and differing:
            return name, differing
    return "", {}
