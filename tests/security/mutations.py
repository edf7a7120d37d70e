"""Changes of the bytes of a file: anywhere, and of the values that its format holds, sealed again as the format needs.

A file whose checksum or length does not fit is refused at the door, so that changed bytes show little of what is
behind it. A `Form` knows how a format holds nested values; what is changed in these is still a file of that format.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

FIELDS = tuple(
    n.to_bytes(8, "little", signed=True) for n in (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
)
ODD: tuple[Any, ...] = (
    None, True, 0, 1, -1, -5, 2**31, 2**62, 2**63, 2**64, 1e300, float("nan"), float("inf"), int("9" * 4000), "",
    "x" * 5000, "../../x", "/etc/passwd", "a\x1b[2J\n", "\ud800", "\0", [], {}, [[]], {"a": {}}, [None] * 9,
    "step-99999999999999999999", "F99",
)  # fmt: skip
TOKENS = (
    b"\0", b"\xff" * 8, b"-5", b"1e300", b"9" * 5000, b"18446744073709551616", b"[" * 2000, b'{"a":' * 2000, b"NaN",
    b"null", b"\xed\xa0\x80", b"\\ud800", b'"', b"}", b",", b"\n", b"\t", b"&a [*a]", b"!!python/object", b"${a}",
    b"\x7f\xff\xff\xff",
)  # fmt: skip
_STRUCTURAL = 0.6  # of the mutations, where the format has a form


@dataclass(frozen=True)
class Form:
    """How a format holds nested values.

    Attributes:
        parse: makes dictionaries, lists, texts, bytes and numbers of an honest file.
        seal: makes a file of them, whatever they have become, with lengths, checksums and hashes that fit.
    """

    parse: Callable[[bytes], Any]
    seal: Callable[[Any], bytes]


def mutated(content: bytes, chance: random.Random, form: Form | None) -> tuple[bytes, bool]:
    """One to four changes; returns the file, and whether it was changed in its values and sealed again."""
    if form is not None and chance.random() < _STRUCTURAL:
        value = form.parse(content)
        with suppress(Exception):  # a number that is too large, what the format's own writer cannot hold
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                value = changed_value(value, chance)
            return form.seal(value), True
    for _ in range(chance.randint(1, 4)):
        content = changed_bytes(content, chance)
    return content, False


def changed_bytes(content: bytes, chance: random.Random) -> bytes:
    """One change: of a bit, a stretch or a field.

    A field is a number of 1 to 8 bytes, as the headers and indices of binary formats have it; it becomes 0, -1, huge,
    one more or less, or another field's value, which flips of single bits seldom make of it.
    """
    data = bytearray(content)
    at = chance.randrange(len(data) + 1) if chance.random() < 0.7 else min(len(data), chance.randrange(64))
    kind = chance.randrange(10)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        data[at:at] = chance.choice(TOKENS)
    elif kind == 2:
        token = chance.choice(TOKENS)
        data[at : at + len(token)] = token
    elif kind == 3:
        del data[at : at + chance.choice((1, 4, 8, 100))]
    elif kind == 4:
        data[at : at + 8] = chance.randbytes(8)
    elif kind == 5:  # a stretch again, elsewhere
        to = chance.randrange(len(data) + 1)
        data[to:to] = data[at : at + chance.choice((1, 8, 64, 512))]
    elif kind >= 7 and len(data) >= 16:
        size = chance.choice((1, 2, 4, 4, 8, 8))
        here, there = (chance.randrange(len(data) // size) * size for _ in range(2))
        value = int.from_bytes(data[here : here + size], "little")
        near = ((value + chance.choice((-1, 1))) % (1 << 8 * size)).to_bytes(size, "little")
        others = (near, *(n[:size] for n in FIELDS), bytes(data[there : there + size]))
        data[here : here + size] = chance.choice(others)
    else:
        del data[at:]
    return bytes(data)


def changed_value(value: Any, chance: random.Random) -> Any:
    """A nested value with one place changed."""
    places: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        at = pending.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ()
        places += [(at, key) for key in keys]
        pending += [at[key] for key in keys]
    if not places:
        return copy.deepcopy(chance.choice(ODD))
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.15:  # what another place has
        other, name = chance.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif kind < 0.45:
        holder[key] = copy.deepcopy(chance.choice(ODD))  # or what is changed in it later is changed in all that follow
    elif kind < 0.7:
        holder[key] = _nearly(holder[key], chance)
    elif kind < 0.8 and isinstance(holder, list):
        holder.insert(chance.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    elif kind < 0.9 or isinstance(holder, list):
        del holder[key]
    else:
        holder[str(chance.choice(ODD))] = holder.pop(key)
    return value


def _nearly(value: Any, chance: random.Random) -> Any:
    """What looks much like a value."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return chance.choice((value + 1, value - 1, -value, value * 2, value * 1000, str(value), float(value), [value]))
    if isinstance(value, bytes):
        return changed_bytes(value, chance)
    if isinstance(value, str):
        at = chance.randrange(len(value) + 1)
        others = (
            value[:at],
            value[at:],
            value + value,
            value.upper(),
            f"{value[:at]}{chance.choice(_LETTERS)}{value[at:]}",
        )
        return chance.choice(others)
    return [value]


_LETTERS = (
    "/",
    "..",
    "\0",
    "\n",
    "\t",
    " ",
    '"',
    "'",
    ",",
    ";",
    ":",
    "(",
    "[",
    "-",
    "9",
    "e9",
    "é",
    "\ud800",
    "\u2028",
)
