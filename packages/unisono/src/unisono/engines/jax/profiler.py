"""Named parts of a step for JAX's profiler; while it is off, a part costs one check of a flag."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

from unisono.engines.observers import Observer
from unisono.engines.protocol import TRACE_PREFIX
from unisono.runtime.files import atomic_file
from unisono.runtime.untrusted import safe_writing

_NULL_CONTEXT: AbstractContextManager[Any] = nullcontext()


class JaxProfiler(Observer):
    """JAX's profiler of this process; see `unisono.engines.protocol.Profiler`."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def part(self, name: str) -> AbstractContextManager[Any]:
        """The context of a part of a step."""
        return _NULL_CONTEXT if self._folder is None else jax.profiler.TraceAnnotation(TRACE_PREFIX + name)

    def start(self) -> None:
        """Record from now on."""
        self._folder = Path(tempfile.mkdtemp(prefix="unisono-profile-"))
        jax.profiler.start_trace(str(self._folder))

    def stop(self, path: Path | None) -> None:
        """Stop, and write a gzipped Chrome trace if a path is given; the file appears complete or not at all."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        try:
            jax.profiler.stop_trace()
            if path is not None:
                found = next(folder.rglob("*.trace.json.gz"))
                with gzip.open(found, "rt", encoding="utf-8") as file:
                    trace = json.load(file)
                trace["traceEvents"] = [_with_category(event) for event in trace["traceEvents"]]
                safe_writing.make_folder(path.parents[1], path.parent.name)
                with atomic_file(path) as temporary, gzip.open(temporary, "wt", encoding="utf-8") as packed:
                    json.dump(trace, packed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _with_category(event: dict[str, Any]) -> dict[str, Any]:
    """An event with the category that torch's profiler uses, which the reader of profiles needs."""
    name, arguments = str(event.get("name", "")), event.get("args") or {}
    if name.startswith(TRACE_PREFIX):
        return {**event, "cat": "user_annotation"}
    return {**event, "cat": "cpu_op"} if "hlo_op" in arguments else event
