"""Text for messages: untrusted text made safe for a terminal and a log, and lists cut short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_COPIED = re.compile(r"  unisono[ .]|    \S")  # lines that are not folded
_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between columns

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_IN_LINES = re.compile(_CONTROLS.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))


def one_line(text: object, limit: int = 200) -> str:
    r"""Format an untrusted name or value for a sentence: control characters escaped, at most `limit` characters.

    >>> one_line("a\x1b[2Jb\n", 20), one_line("x" * 9, 4)
    ('a\\x1b[2Jb\\x0a', 'xxxx…')
    """
    shown = _CONTROLS.sub(_escape, str(text)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


def escape_controls(text: str) -> str:
    r"""Escape every control character of a message except newlines and tabs.

    >>> escape_controls("one\ntwo\x1b[31m")
    'one\ntwo\\x1b[31m'
    """
    return _CONTROLS_IN_LINES.sub(_escape, text)


def escape_line(text: str) -> str:
    r"""Escape every control character of a message that is one line; line breaks at its end are left out.

    >>> escape_line("one\nunisono: two\n")
    'one\\x0aunisono: two'
    """
    return _CONTROLS.sub(_escape, text.rstrip("\n"))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def format_value(value: object) -> str:
    """A value as it is shown to a person: what is below names comes as names and values.

    >>> format_value({"kind": "maze 30×30", "puzzles": 1000}), format_value(["a", "b"]), format_value(4)
    ('kind maze 30×30, puzzles 1000', 'a, b', '4')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_value(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(format_value, value)) or "none"
    return str(value)


def find_stretches(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and the last of each stretch of consecutive numbers in ascending ones.

    >>> find_stretches([0, 1, 2, 5])
    [(0, 2), (5, 5)]
    """
    stretches: list[tuple[int, int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1] = stretches[-1][0], number
        else:
            stretches.append((number, number))
    return stretches


def join_names(names: Iterable[str], most: int = 4) -> str:
    """Join the first names, and say how many more there are.

    >>> join_names(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_count(number: float) -> str:
    """Format a number for people: 950, 12.3k, 2.41M, 7.24G.

    >>> format_count(2_412_480), format_count(12_345), format_count(950)
    ('2.41M', '12.3k', '950')
    """
    for limit, sign, digits in ((1e9, "G", 2), (1e6, "M", 2), (1e3, "k", 1)):
        if number >= limit:
            return f"{number / limit:.{digits}f}{sign}"
    return f"{number:.0f}"


def format_bytes(size: float) -> str:
    """Format a size for people.

    >>> format_bytes(950), format_bytes(2_400_000), format_bytes(999_960), format_bytes(12_345_678_901)
    ('950 B', '2.4 MB', '1 MB', '12.3 GB')
    """
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * limit:
            return f"{size / limit:.3g} {unit}"
    return f"{size:.0f} B"


def fold(text: str, width: int) -> str:
    """A message for people folded between words; what follows is indented, or below the column that it belongs to.

    A long word (a path) stays whole, and so does what is copied: a command, or code in a traceback.

    >>> print(fold("one two three", 8))
    one two
      three
    >>> print(fold("host  one two three", 14))
    host  one two
          three
    """
    import textwrap

    folded = []
    for line in text.splitlines() or [""]:
        if len(line) <= width or _COPIED.match(line):
            folded.append(line.rstrip())
            continue
        if not line.strip("─ "):  # a rule of a table
            folded.append(line[:width])
            continue
        indent = len(line) - len(line.lstrip())
        columns = [gap.end() for gap in _GAP.finditer(line) if gap.end() <= width // 2]
        folded += textwrap.wrap(
            line.rstrip(), width, subsequent_indent=" " * (columns[-1] if columns else indent + 2),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(folded)
