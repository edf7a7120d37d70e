"""Tables for the terminal: columns as wide as what is in them, below each other where they are too many."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.runtime.text import one_line

_GAP = "  "


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | str = 1, width: int | None = None
) -> list[str]:
    """The lines of a table; columns that do not fit follow below, beginning with the first column again.

    Args:
        head: names of the columns.
        rows: cells, made safe for a terminal here.
        left: how many columns, from the first, are texts; or the alignment of each, as in "<>>".
        width: of the terminal; None for no limit.

    >>> format_table(["run", "loss"], [["a", "1.5"], ["longer", "10.25"]])
    ['run      loss', 'a         1.5', 'longer  10.25']
    >>> format_table(["run", "loss", "time"], [["a", "1.5", "3 s"]], width=12)
    ['run  loss', 'a     1.5', '', 'run  time', 'a     3 s']
    """
    head, rows = [one_line(cell) for cell in head], [[one_line(cell) for cell in row] for row in rows]
    aligned = left if isinstance(left, str) else "<" * left + ">" * (len(head) - left)
    widths = [max(len(line[column]) for line in [head, *rows]) for column in range(len(head))]
    lines: list[str] = []
    for columns in split_columns(widths, width, len(_GAP)):
        lines += [""] if lines else []
        lines += [
            _GAP.join(f"{line[column]:{aligned[column]}{widths[column]}}" for column in columns).rstrip()
            for line in [head, *rows]
        ]
    return lines


def split_columns(widths: Sequence[int], limit: int | None, gap: int) -> list[list[int]]:
    """Which columns stand side by side: each part begins with the first, and has as many others as fit, at least one.

    >>> split_columns([3, 4, 4, 9], 13, gap=2), split_columns([3, 4, 4, 9], None, gap=2)
    ([[0, 1], [0, 2], [0, 3]], [[0, 1, 2, 3]])
    """
    parts = [[0]]
    for column in range(1, len(widths)):
        taken = sum(widths[one] + gap for one in parts[-1])
        if limit is not None and taken + widths[column] > limit and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(column)
    return parts
