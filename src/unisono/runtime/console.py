"""What is said to a person: the one place that prints, so that whatever was read somewhere passes the same two filters.

A host's name, a file's, a record or a library's error may hold a secret, or control characters that move the cursor and
forge lines. `clean` takes both out; logs, events and records of faults use it, too.
"""

from __future__ import annotations

import sys

from unisono.runtime import secrets
from unisono.runtime.text import escape_controls


def clean(text: object) -> str:
    """A message as it may be shown and stored: secrets masked, control characters but tabs and new lines escaped."""
    return escape_controls(secrets.mask(str(text)))


def say(text: object = "", *, error: bool = False) -> None:
    """Print a message at once, on stdout, or for an `error` or a warning on stderr."""
    print(clean(text), file=sys.stderr if error else sys.stdout, flush=True)
