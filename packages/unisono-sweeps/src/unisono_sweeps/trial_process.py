"""The process that tries models, as the sweep sees it: it starts early, so that its imports cost no time."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class Trials:
    """Tries models in a process of their own; see `unisono_sweeps.trial`.

    Args:
        recipe: whose libraries it imports at once.
    """

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._folder = tempfile.TemporaryDirectory(prefix="unisono-trials-")
        self._results = Path(self._folder.name, "results.jsonl")
        self._errors = Path(self._folder.name, "errors")
        self._process = self._start()

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def run(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What came of each trial; one that ended its process is reported, and the others go on without it.

        Args:
            requests: `number`, `recipe`, `config_dir` and `words` of each.
        """
        outcomes: dict[int, dict[str, Any]] = {}
        while left := [one for one in requests if one["number"] not in outcomes]:
            self._process.communicate("".join(json.dumps(one) + "\n" for one in left))
            lines = self._results.read_text(encoding="utf-8").splitlines() if self._results.exists() else []
            outcomes |= {int(one["number"]): one for one in map(json.loads, lines)}
            current = next((one["number"] for one in left if one["number"] not in outcomes), None)
            if current is None:
                break
            said = (self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"])[-1]
            code = self._process.returncode
            error = f"the trial of this model ended with exit code {code}: {said}"
            outcomes[current] = {"number": current, "error": error}
            self._process = self._start()
        return [outcomes[one["number"]] for one in requests]

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "unisono_sweeps.trial", self._recipe, str(self._results)]
        with self._errors.open("wb") as errors:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True)
