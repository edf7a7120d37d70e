"""How a step is computed: the protocol that the loop knows, the rules that all engines share, and an engine a room."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.engines.protocol import Engine, Job


def create_engine(job: Job) -> Engine:
    """The engine of the framework that the task is written for (`Task.engine`; torch where it does not say)."""
    name = getattr(job.task, "engine", "torch")
    engine: Engine = import_module(f"unisono.engines.{name}.engine").create(job)
    return engine
