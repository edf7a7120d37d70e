"""Whether this process is the kernel of a notebook, and what it offers there; IPython itself is never imported here."""

from __future__ import annotations

import os
import sys
from typing import Any


def find_shell() -> Any:
    """The shell of the notebook that this process is the kernel of; None anywhere else, in IPython's terminal too."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return shell if getattr(shell, "kernel", None) is not None else None


def in_notebook() -> bool:
    """Whether what is displayed appears below a cell."""
    return find_shell() is not None


def is_below_cell() -> bool:
    """Whether a kernel has started this command, as `!unisono evaluate …` does.

    Its output is a terminal, but what overwrites a line there is shown as one line after the other. Jupyter sets the
    variable for a kernel, not for its terminals.
    """
    return "JPY_PARENT_PID" in os.environ


class LiveOutput:
    """One output below a cell that is replaced whenever there is something new.

    Args:
        content: Has a `_repr_html_` and a `__repr__`; what they return may change.
    """

    def __init__(self, content: Any) -> None:
        from IPython.display import display

        self._content = content
        self._handle = display(content, display_id=True)

    def update(self) -> None:
        """Show what the content is now."""
        self._handle.update(self._content)
