"""Which runs no other one beats."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]], mode: str = "min") -> list[int]:
    """The numbers of the points that no other one beats in cost and value, by rising cost.

    Args:
        points: cost and value of each.
        mode: whether the smallest or the largest value is best, `min` or `max`.

    >>> pareto_front([(1.0, 5.0), (2.0, 3.0), (3.0, 4.0), (4.0, 1.0)])
    [0, 1, 3]
    """
    sign = 1.0 if mode == "min" else -1.0
    front: list[int] = []
    best = float("inf")
    for number in sorted(range(len(points)), key=lambda n: (points[n][0], sign * points[n][1])):
        if sign * points[number][1] < best:
            best = sign * points[number][1]
            front.append(number)
    return front
