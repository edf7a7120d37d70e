"""Compiles every program of a run, by name and shape.

So recompilations are known exactly, all processes are checked to have the same program before any of them runs it
(a process with a different one would wait in another collective for ever), and long compilations are reported.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.display.compiling import compiling
from unisono.runtime.errors import ConfigError, DesyncError
from unisono.runtime.fault_names import FaultName

_CACHE_HIT = "/jax/compilation_cache/cache_hits"

Program = Callable[..., Any]
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]


@dataclass(frozen=True)
class ProgramKey:
    """What a program is compiled for.

    Attributes:
        name: of the program, for people.
        shapes: name, shape and dtype of every array of a batch.
        static: scheduled values that it depends on, by name.
        rows: real rows of a short global batch, where it is compiled for their number; that is no surprise.
    """

    name: str
    shapes: Shapes
    static: tuple[tuple[str, Any], ...] = ()
    rows: int = 0


class ProgramError(DesyncError):
    """Processes that would run different programs. Every rank says so, before any of them is run."""

    fault = FaultName.DIFFERENT_PROGRAMS


class Compiler:
    """Compiles the programs of one process."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._programs: dict[ProgramKey, Program] = {}
        self.seconds = 0.0
        self.cached = 0
        self.recompiled: list[str] = []

    def get(self, key: ProgramKey, make: Callable[[], Any], *arguments: Any) -> Program:
        """The program for a key, compiled if there is none; collective where it is compiled.

        Args:
            key: what it is for.
            make: gives the jitted function.
            arguments: of the function; only shapes, dtypes and shardings count.

        Raises:
            ConfigError: on one process, where its arrays have shapes that others may not have.
            ProgramError: on every process, if they do not have the same program.
        """
        if key not in self._programs:
            before = [k for k in self._programs if (k.name, k.static, k.rows) == (key.name, key.static, key.rows)]
            if before and self._communicator.size > 1:
                raise ConfigError(
                    f"{_describe_change(before[-1], key)}. All processes must run one program for one shape: pad to a "
                    "fixed length in collate()"
                )
            others = [known for known in self._programs if known.name == key.name]
            if others and (others[-1].shapes, others[-1].static) != (key.shapes, key.static):
                self.recompiled.append(_describe_change(others[-1], key))
            self._programs[key] = self._compile(key, make, arguments)
        return self._programs[key]

    def _compile(self, key: ProgramKey, make: Callable[[], Any], arguments: Any) -> Program:
        with compiling(key.name, shown=self._communicator.rank == 0), self._counting_cache_hits():
            lowered = make().trace(*arguments).lower()
            if self._communicator.size > 1:
                self._agree(key, lowered.as_text())
            began = time.perf_counter()
            program: Program = lowered.compile()
            self.seconds += time.perf_counter() - began
        return program

    def _agree(self, key: ProgramKey, text: str) -> None:
        name, digest = key.name, hashlib.sha256(text.encode()).hexdigest()
        mine = [digest, *(f"'{array}' is {dtype} {shape}" for array, shape, dtype in key.shapes)]
        messages = self._communicator.gather(mine, f"the program of {name} on all ranks")
        others = [str(rank) for rank, theirs in enumerate(messages) if theirs != messages[0]]
        if others:
            pairs = zip(messages[0][1:], messages[int(others[0])][1:], strict=False)
            if different := [pair for pair in pairs if pair[0] != pair[1]]:
                error = ConfigError(
                    f"the batches of ranks differ in shape or type: {different[0][0]} on rank 0, and {different[0][1]} "
                    f"on rank {others[0]}. All processes run one program for one shape: pad to a fixed length in "
                    "collate()"
                )
                error.agreed = True
                raise error
            raise ProgramError(
                f"rank 0 and rank {', '.join(others)} would run different programs for {name}: what outputs() and "
                "loss() do depends on the process (jax.process_index(), an environment variable, the order of a "
                "set, a number of the host). Nothing was computed",
                agreed=True,
            )

    @contextmanager
    def _counting_cache_hits(self) -> Iterator[None]:
        jax.monitoring.register_event_listener(self._on_jax_event)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_listener(self._on_jax_event)

    def _on_jax_event(self, event: str, **_: Any) -> None:
        self.cached += event == _CACHE_HIT


def _describe_change(before: ProgramKey, now: ProgramKey) -> str:
    old, new = dict(before.static), dict(now.static)
    messages = [f"{name} is {new.get(name)}, and was {old.get(name)}" for name in new if new.get(name) != old.get(name)]
    shapes = {name: (shape, dtype) for name, shape, dtype in before.shapes}
    for name, shape, dtype in now.shapes:
        if shapes.get(name) != (shape, dtype):
            was = f"was {shapes[name][1]} {shapes[name][0]}" if name in shapes else "was not there"
            messages.append(f"the batch's '{name}' is {dtype} {shape}, and {was}")
    gone = sorted(shapes.keys() - {name for name, _, _ in now.shapes})
    messages += [f"the batch's '{name}' is missing" for name in gone]
    return f"{now.name}: {'; '.join(messages)}"
