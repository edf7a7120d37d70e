"""Named parts of a step for torch's profiler; while it is off, a part only costs checking a flag."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from unisono.engines.observers import Observer
from unisono.engines.protocol import TRACE_PREFIX
from unisono.runtime.files import atomic_file
from unisono.runtime.untrusted import safe_writing

_NULL_CONTEXT: AbstractContextManager[Any] = nullcontext()


class TorchProfiler(Observer):
    """torch's profiler of this process, for the CPU and the device; see `unisono.engines.protocol.Profiler`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._running: profile | None = None

    def part(self, name: str) -> AbstractContextManager[Any]:
        """The context of a part of a step."""
        return _NULL_CONTEXT if self._running is None else record_function(TRACE_PREFIX + name)

    def start(self) -> None:
        """Record from now on."""
        activities = [ProfilerActivity.CPU]
        activities += [a for a in torch.profiler.supported_activities() if a.name.lower() == self._device.type]
        self._wait()
        running = profile(activities=list(dict.fromkeys(activities)))
        running.start()
        self._running = running

    def stop(self, path: Path | None) -> None:
        """Stop, and write a gzipped Chrome trace if a path is given; the file appears complete or not at all."""
        running, self._running = self._running, None
        if running is None:
            return
        self._wait()
        running.stop()
        if path is not None:
            folder = safe_writing.make_folder(path.parents[1], path.parent.name)
            with tempfile.TemporaryDirectory(dir=folder) as private:
                plain = Path(private, "trace.json")
                running.export_chrome_trace(str(plain))
                with plain.open("rb") as trace, atomic_file(path) as temporary, gzip.open(temporary, "wb") as packed:
                    shutil.copyfileobj(trace, packed)

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
