"""How a step is computed: the protocol the loop uses, the rules all engines share, and one package per engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.engines.protocol import Engine, EngineJob


def create_engine(job: EngineJob) -> Engine:
    """The engine that the layout names; for `auto`, that of the task's framework."""
    configured = job.config.layout.engine
    name = job.task.engine if configured == "auto" else configured
    engine: Engine = import_module(f"unisono.engines.{name}.engine").create(job)
    return engine
