"""Tables for the terminal: columns as wide as what is in them, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.runtime.text import one_line


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table; the first `left` columns are texts.

    >>> format_table(["run", "loss"], [["a", "1.5"], ["longer", "10.25"]])
    ['run      loss', 'a         1.5', 'longer  10.25']
    """
    head, rows = [one_line(cell) for cell in head], [[one_line(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [head, *rows]
    ]


def format_number(value: float | None) -> str:
    """A number for a table; a dash for none.

    >>> format_number(0.00012345), format_number(1234567.0), format_number(3), format_number(None)
    ('0.0001234', '1.235e+06', '3', '–')
    """
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


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
