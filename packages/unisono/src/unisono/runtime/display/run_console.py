"""The console on which a run draws: rich's, which goes on where its reader or its terminal is gone."""

from __future__ import annotations

import errno
from typing import Any

from rich.console import Console

from unisono.runtime.console import discard_output, lose
from unisono.runtime.display import notebook


class RunConsole(Console):
    """A console whose reader may go away; rich itself would end the process without a word."""

    @property
    def is_terminal(self) -> bool:
        """Whether there is a terminal; FORCE_COLOR, which CI and notebooks set, makes none of a pipe."""
        return super().is_terminal and self.file.isatty() and not notebook.is_below_cell()

    def print(self, *texts: Any, **settings: Any) -> None:
        """Print, if that is possible: no run ends because its output cannot be written."""
        try:
            super().print(*texts, **settings)
        except OSError as error:
            self._lose(error)

    def __exit__(self, *error: Any) -> None:
        """Write what a live display has drawn, if that is possible."""
        try:
            super().__exit__(*error)
        except OSError as failed:
            self._lose(failed)

    def _lose(self, error: OSError) -> None:
        self.quiet = error.errno == errno.EIO  # a terminal that is gone takes nothing any more
        lose(self.file, error)

    def on_broken_pipe(self) -> None:
        """Discard what is printed from now on."""
        self.quiet = True
        discard_output(self.file)
