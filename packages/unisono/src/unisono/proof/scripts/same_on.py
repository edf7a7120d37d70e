"""`same_on`: a proof as a test of pytest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.proof.prove import prove_task
from unisono.proof.scripts.function_proof import compare
from unisono.proof.scripts.script_proof import parse_script_settings, prove_script
from unisono.runtime.errors import ConfigError
from unisono.task import Task


def same_on(worlds: Sequence[int] = (1, 2), *, settings: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make a test of pytest prove what it returns, which fails with the table and the diagnosis of the proof.

    A test returns a task (its class, or `path/to/file.py:Class`), the path of a script, or a training function at the
    top level of its file. A function without parameters is run as it is; one with a parameter gets the `World`.
    The test fails, too, where nothing could be compared.

    Args:
        worlds: numbers of processes; one is the reference.
        settings: as on the command line, e.g. `["steps=3"]`.

    Example:
        @same_on(worlds=[1, 2])
        def test_my_task():
            return MyTask
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def proved(*args: Any, **named: Any) -> None:
            import pytest

            __tracebackhide__ = True
            exit_code, text = prove_subject(test(*args, **named), worlds, settings)
            if exit_code:
                pytest.fail(text, pytrace=False)
            print(text)  # noqa: T201 - pytest shows it on demand

        return proved

    return decorate


def prove_subject(subject: Any, worlds: Sequence[int], settings: Sequence[str]) -> tuple[int, str]:
    """Prove what a test has returned; returns the exit code of the proof, and its report.

    Raises:
        ConfigError: for what cannot be proved.
    """
    many = [world for world in worlds if world > 1]
    if not many:
        raise ConfigError(f"worlds={list(worlds)}: one process is compared with 2 or more, e.g. worlds=[1, 2]")
    if isinstance(subject, str) or (isinstance(subject, type) and issubclass(subject, Task)):
        layouts = f"layouts=[{','.join(f'{strategy}:{world}' for world in many for strategy in ('ddp', 'fsdp'))}]"
        proved = prove_task(subject, [layouts, *settings])
        return int(not proved.passed), str(proved)
    if isinstance(subject, Path) or (callable(subject) and not inspect.signature(subject).parameters):
        report = prove_script(subject, (), parse_script_settings([f"worlds={[1, *many]}", *settings]), quiet=True)
    elif callable(subject):
        given = parse_script_settings(settings).model_dump(include={"precision", "timeout"}, exclude_unset=True)
        report = compare(subject, many, **given, quiet=True)
    else:
        raise ConfigError(
            f"the test returned {type(subject).__name__}; return what is to be proved: a task's class, the Path of a "
            "script, or a training function at the top level of its file"
        )
    return report.exit_code, "\n".join(report.lines)
