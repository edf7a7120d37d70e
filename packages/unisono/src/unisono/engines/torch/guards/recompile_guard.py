"""Reports what `torch.compile` recompiles after the warm-up, and why.

With static shapes nothing is. A changed shape, flag or number makes dynamo recompile, which takes seconds
to minutes each time and, after a few, ends in a silent fallback to eager mode.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.engines.observers import Observer, StepResult, StepVerdict
from unisono.runtime.communication.communicator import Communicator

log = logging.getLogger(__name__)


class RecompileGuard(Observer):
    """Reports what all processes compile in a step. Costs nothing if nothing is compiled."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._last_seen: Any = None
        self._failed: dict[Any, int] = {}
        self._warned = False

    def on_step_begin(self, step: int, batches: Sequence[object]) -> None:
        """Ignore what was compiled before: set-up, evaluation, or another run in this process."""
        self._step = step
        self._last_seen = next(iter(reversed(_compilations())), None)
        self._failed = {code: len(reasons) for code, reasons in _failures().items()}

    def votes(self) -> Sequence[float]:
        """How many compilations this rank has to report."""
        self._own_compilations = self.compilations()
        return [float(len(self._own_compilations))]

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        """If any rank compiled something, gather it into the step's record, and warn the first time."""
        if not votes[0]:
            return None
        everyone = self._communicator.gather(self._own_compilations, "what was compiled again")
        report = "; ".join(f"rank {rank}, {line}" for rank, lines in enumerate(everyone) for line in lines)
        if not self._warned:
            self._warned = True
            log.warning(
                "step %d: torch.compile recompiled after the warm-up, and will do so each time this happens: %s. Give "
                "batches one shape (pad to a fixed length, make train.global_batch divide the rows), or use "
                "layout.compile=false. Later ones are in events.jsonl (`recompiled`)",
                self._step + 1,
                report,
            )
        return StepVerdict(recompiled=report)

    def compilations(self) -> list[str]:
        """The compilations since the step began, one line each."""
        found = []
        for compiled in reversed(_compilations()):
            if compiled is self._last_seen:
                break
            if compiled.co_name is not None:  # else it is the backward pass of one that is reported
                where = f"{compiled.co_name} ({Path(compiled.co_filename or '?').name}:{compiled.co_firstlineno})"
                found.append(f"{where}: {self._reason(compiled)}")
        return found[::-1]

    def _reason(self, compiled: Any) -> str:
        """The guards that failed, for every existing compilation of the function, not only the newest."""
        frame = compiled.co_filename, compiled.co_firstlineno
        failures = _failures().items()
        failed = {code: reasons for code, reasons in failures if (code.co_filename, code.co_firstlineno) == frame}
        new = [str(reason) for code, reasons in failed.items() for reason in reasons[self._failed.get(code, 0) :]]
        text = " / ".join(dict.fromkeys(reason.strip() for reason in new))
        return text or compiled.recompile_reason or "for the first time"


def _compilations() -> list[Any]:
    """The newest compilations of this process, the oldest first."""
    utils = sys.modules.get("torch._dynamo.utils")  # importing it takes seconds, and without it nothing is compiled
    return [] if utils is None else utils.get_compilation_metrics()


def _failures() -> dict[Any, list[Any]]:
    """Why compilations of a function did not match, by its code."""
    utils = sys.modules.get("torch._dynamo.utils")
    return {} if utils is None else dict(utils.guard_failures)
