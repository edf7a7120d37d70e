"""How numbers and durations are shown in tables, in reports and on an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_WIDE = 10.0


def format_number(value: float | None) -> str:
    """A number for a table; a dash for none.

    >>> format_number(0.00012345), format_number(1234567.0), format_number(3), format_number(None)
    ('0.0001234', '1.235e+06', '3', '–')
    """
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def format_cell(value: Any) -> str:
    """Any value for a table.

    >>> format_cell(0.5), format_cell("adamw"), format_cell(None)
    ('0.5', 'adamw', '–')
    """
    return format_number(value) if isinstance(value, int | float | None) else str(value)


def is_wide(values: Sequence[float]) -> bool:
    """Whether numbers differ so much that a logarithmic axis shows them better.

    >>> is_wide([12, 24, 192]), is_wide([1, 2, 3]), is_wide([0, 100])
    (True, False, False)
    """
    return min(values) > 0 and max(values) >= _WIDE * min(values)


def format_seconds(seconds: float | None) -> str:
    """A duration for people.

    >>> format_seconds(0.4), format_seconds(75), format_seconds(7300), format_seconds(200000)
    ('0.4 s', '75 s', '2.0 h', '2.3 d')
    """
    if seconds is None:
        return "–"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}" if seconds / size >= 10 else f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:.1f} d"
