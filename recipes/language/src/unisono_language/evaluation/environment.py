"""Environments of `verifiers`, played with the model in training: `eval.environment=NAME`.

The processes write the weights as an export, rank 0 has transformers' own server load it on a free port of this
machine, and `verifiers` plays against that, in a process beside the run. It costs an export and a second copy of the
model; for that, tools, sandboxes and several turns are those that the environment has everywhere else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono import ConfigError, RunError
from unisono.recipe_tools import import_extra, safe_paths
from unisono_language.data.chat import ChatTemplate
from unisono_language.evaluation.environment_process import GRACE, last_line

_SETTING, _EXTRA = "eval.environment", "environments"
_RESULT, _ERRORS, _LOG = "result.json", "errors.txt", "server.txt"


class _Result(TypedDict):
    values: dict[str, float]
    samples: list[dict[str, Any]]


def open_environment(
    name: str, limit: int | None, chat: ChatTemplate | None, tokenizer: Path | None, samples: list[dict[str, Any]]
) -> Environment:
    """An environment that there is, for a model that can be asked in conversations.

    Args:
        name: as for `Environment`.
        limit: as for `Environment`.
        chat: template of the run; None where it trains on documents.
        tokenizer: whose template that run has.
        samples: as for `Environment`.

    Raises:
        ConfigError: if there is no such environment or no template, or a package is missing.
    """
    found = Environment(name, limit, samples)
    template = chat or (ChatTemplate.from_tokenizer(tokenizer, None, {}, "assistant") if tokenizer else None)
    if template is None or not template.source:
        raise ConfigError(
            f"{_SETTING} asks in conversations, and this tokenizer has no chat template; train on conversations "
            "(data=chat), or begin with a model that has one"
        )
    found.check()
    return found


class Environment:
    """A taskset of `verifiers`.

    Args:
        name: of its module, which is installed or stands in the working directory.
        limit: tasks of it; None for all.
        samples: is filled with some tasks, answers and rewards of the newest evaluation.
    """

    name = _SETTING

    def __init__(self, name: str, limit: int | None, samples: list[dict[str, Any]]) -> None:
        self._asked, self._limit, self._samples = name, limit, samples
        self._module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()  # as verifiers reads it
        self.prefix = f"environment/{self._module}/"
        self._process: subprocess.Popen[bytes] | None = None
        self._starting, self._given_up = threading.Lock(), False

    def check(self) -> None:
        """Refuse an environment that there is not; its code is imported when it is played."""
        from transformers.utils.import_utils import is_serve_available

        verifiers = import_extra("verifiers", _EXTRA, _SETTING)
        if not is_serve_available():
            raise ConfigError(f"{_SETTING} needs transformers[serving]: pip install 'unisono[{_EXTRA}]'")
        shipped = Path(verifiers.__file__).parent / "v1" / "tasksets" / self._module
        if not shipped.is_dir() and PathFinder.find_spec(self._module, [os.getcwd(), *sys.path]) is None:  # noqa: PTH109
            raise ConfigError(
                f"{_SETTING}={self._asked}: there is no module '{self._module}', neither installed nor in "
                f"{Path.cwd()}; install the environment, or start where its module is"
            )

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        beside = folder.parent
        asked = {
            "model": str(folder), "name": self._asked, "limit": self._limit, "result": str(beside / _RESULT),
            "log": str(beside / _LOG),
        }  # fmt: skip
        (beside / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
        command = [sys.executable, "-m", "unisono_language.evaluation.environment_process", str(beside / "asked.json")]
        with (beside / _ERRORS).open("wb") as errors:
            return subprocess.Popen(
                [*command, str(os.getpid())], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                start_new_session=True,
            )  # fmt: skip

    def measure_folder(self, folder: Path) -> Mapping[str, float]:
        """The mean reward, each reward and metric of the environment, and how many episodes failed."""
        beside = folder.parent
        with self._starting:
            given_up, self._given_up = self._given_up, False
            if given_up:
                raise RunError(f"{_SETTING}={self._asked} was given up")
            process = self._process = self._start(folder)
        if process.wait():
            raise RunError(f"{_SETTING}={self._asked}: {last_line(beside / _ERRORS)}")
        found = safe_paths.read_json(beside, _RESULT, _Result)
        self._samples[:] = found["samples"]
        return {f"{self.prefix}{name}": value for name, value in found["values"].items()}

    def stop(self) -> None:
        """End the environment, its programs and the server; a measurement whose thread is late starts none."""
        with self._starting:
            process, self._process = self._process, None
            self._given_up = process is None
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the server ends with the process that started it
        process.wait()
