"""A guard on `torch.compile`: what is compiled again once a run is warm, and why.

With static shapes nothing is. A shape, a flag or a number that changes makes dynamo compile again, which takes seconds
to minutes a time and, after a few, ends in a silent return to eager mode.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from unisono.runtime.communicator import Group

log = logging.getLogger(__name__)


class Recompilations:
    """What this process compiles between `settle` and `fresh`. Free of cost where nothing is compiled."""

    def __init__(self) -> None:
        self._known: Any = None
        self._failed: dict[Any, int] = {}
        self._warned = False

    def settle(self) -> None:
        """What was compiled until now does not count: set-up, evaluation, or another run in this process."""
        self._known = next(iter(reversed(_compilations())), None)
        self._failed = {code: len(reasons) for code, reasons in _failures().items()}

    def fresh(self) -> list[str]:
        """What was compiled since `settle`, one line each."""
        found = []
        for made in reversed(_compilations()):
            if made is self._known:
                break
            if made.co_name is not None:  # else it is the backward pass of one that is told
                where = f"{made.co_name} ({Path(made.co_filename or '?').name}:{made.co_firstlineno})"
                found.append(f"{where}: {self._why(made)}")
        return found[::-1]

    def _why(self, made: Any) -> str:
        """The guards that failed: of every compilation of the function that was there, not of its newest alone."""
        frame = made.co_filename, made.co_firstlineno
        failures = _failures().items()
        failed = {code: reasons for code, reasons in failures if (code.co_filename, code.co_firstlineno) == frame}
        new = [str(reason) for code, reasons in failed.items() for reason in reasons[self._failed.get(code, 0) :]]
        told = " / ".join(dict.fromkeys(reason.strip() for reason in new))
        return told or made.recompile_reason or "for the first time"

    def tell(self, group: Group, fresh: list[str], step: int) -> str:
        """Warn of what ranks compiled in a step, the first time; collective. Returns it as one text."""
        everyone = group.gather(fresh, "what was compiled again")
        told = "; ".join(f"rank {rank}, {line}" for rank, lines in enumerate(everyone) for line in lines)
        if not self._warned:
            self._warned = True
            log.warning(
                "step %d: torch.compile compiled again after the warm-up, and will each time this happens: %s. Give "
                "batches one shape (pad to a fixed length, make train.global_batch divide the rows), or use "
                "layout.compile=false. Later ones are in events.jsonl (`recompiled`)",
                step + 1,
                told,
            )
        return told


def _compilations() -> list[Any]:
    """The newest compilations of this process, the oldest first."""
    utils = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, and without it nothing is compiled
    return [] if utils is None else utils.get_compilation_metrics()


def _failures() -> dict[Any, list[Any]]:
    """Why compilations of a function did not fit, by its code."""
    utils = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else dict(utils.guard_failures)
