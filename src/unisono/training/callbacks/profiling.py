"""Profiles the steps that `observe.profile` names, on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from unisono.callback import RunInfo
from unisono.engines.protocol import Engine
from unisono.observe.profile import Profile
from unisono.training.callbacks.dispatch import LoopCallback
from unisono.training.callbacks.telemetry import Telemetry


class Profiling(LoopCallback):
    """Starts and ends the profile between steps.

    Args:
        engine: whose profiler is used.
        telemetry: shows the table.
    """

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        super().__init__()
        self._engine, self._telemetry = engine, telemetry
        self._profile: Profile | None = None

    def on_start(self, run: RunInfo) -> None:
        """Start if the first step is to be profiled."""
        steps = run.config.observe.profile
        self._profile = Profile(steps, self._engine, run.directory, run.first, run.steps, self._telemetry.say)
        self._profile.start_or_stop(run.first)

    def step(self) -> AbstractContextManager[Any]:
        """The context of one step, from the wait for its data to its update."""
        assert self._profile is not None
        return self._profile.step()

    def after_step(self, step: int) -> None:
        """Start or stop the profile."""
        assert self._profile is not None
        self._profile.start_or_stop(step)

    def on_end(self, step: int, reason: str) -> None:
        """Stop the profile if it still runs."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
