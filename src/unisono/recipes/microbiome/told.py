"""How a mismatch is told: how many of how many, and which ones, for example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

_SHOWN, _LONG = 3, 40


def examples(names: Sequence[str]) -> str:
    """The first few of some names, long ones cut.

    >>> examples(["a", "b", "c", "d"])
    "'a', 'b', 'c', …"
    """
    shown = [repr(name if len(name) <= _LONG else f"{name[:_LONG]}…") for name in names[:_SHOWN]]
    return ", ".join(shown) + (", …" if len(names) > _SHOWN else "")


def how_many(some: Collection[str], all_: int, what: str) -> str:
    """A count with examples.

    >>> how_many(["a", "b"], 5, "samples")
    "2 of 5 samples ('a', 'b')"
    """
    return f"{len(some)} of {all_} {what} ({examples(list(some))})"


def twice(names: Iterable[str]) -> list[str]:
    """The names that are there more than once, in order."""
    return [name for name, count in Counter(names).items() if count > 1]
