"""Errors of a task's own code under JAX: where it is and what to do, instead of pages of JAX's frames."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from unisono.runtime.errors import ConfigError
from unisono.task import Task

_INNER = {"unisono", "jax", "jaxlib", "equinox", "optax", "jaxtyping", "contextlib", "functools", "numpy"}
_MAX_LINES, _MAX_LENGTH = 4, 300  # lines of the task that are shown; characters of the error's first sentence
_LEAK = (
    "keep no array in self, a global or a list: return it from outputs(), or make it the state of rows (initial_carry)"
)
_SIGNATURE = re.compile(r"\w+\.(build|outputs|loss)\(\) (takes|missing) .*")
_ADVICE = (  # the first that fits
    (
        jax.errors.TracerArrayConversionError,
        "NumPy needs numbers, and under jit an array has none: use jax.numpy in outputs() and loss()",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "the shape would depend on values: use jnp.where, or multiply by the mask",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "under jit an array has a shape but no value to decide by: use jnp.where or jax.lax.cond; "
        "scalars of a schedule are Python numbers if named in static_scalars",
    ),
    (jax.errors.UnexpectedTracerError, _LEAK),
    (
        NameError,
        "if this is the axis of psum or pmean: a task computes one micro-batch on one device, and the engine sums over "
        "all; for a loss that needs all rows see cross_sample",
    ),
)


def raise_task_error(error: Exception, task: Task) -> None:
    """Raise an error of the task's code as a sentence with its lines; return where the task had no part in it.

    Raises:
        ConfigError: for a user.
    """
    lines, name, text = list(_task_lines(error)), type(task).__name__, str(error).strip()
    if isinstance(error, TypeError) and (called := _SIGNATURE.search(text)):
        raise ConfigError(
            f"{called[0]}, but JAX tasks are called as build(self, key), outputs(self, model, batch, context) and "
            "loss(self, outputs, batch, context)"
        ) from error
    if "Computation compiled for" in text:  # JAX takes a kept array for one more argument
        raise ConfigError(f"{name}.outputs() or loss() used an array of an earlier call; {_LEAK}") from error
    if not lines and not isinstance(error, jax.errors.JAXTypeError):
        return
    first = re.split(r"\.\s|\n", text, maxsplit=1)[0].rstrip(".")[:_MAX_LENGTH]
    more = [advice for kind, advice in _ADVICE if isinstance(error, kind)][:1]
    if isinstance(error, NameError) and "axis name" not in text:
        more = []
    where = "\n  ".join(["", *lines[-_MAX_LINES:], *more])
    raise ConfigError(f"{name} failed while JAX traced it: {type(error).__name__}: {first}{where}") from error


def raise_callback_error(error: jax.errors.JaxRuntimeError, where: str) -> None:
    """Raise a sentence where a callback to Python failed, as of `jax.pure_callback`.

    Raises:
        ConfigError: with the callback's error and its line.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "callback: Traceback" not in lines[0]:
        return
    place = next((line for line in reversed(lines) if line.startswith("File ")), "")
    raise ConfigError(f"{where}: a callback of the task to Python failed: {lines[-1]} ({place})") from error


def _task_lines(error: Exception) -> Iterator[str]:
    """The lines of the user's code that led to an error, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        code, number = trace.tb_frame.f_code, trace.tb_lineno
        if module.partition(".")[0] not in _INNER:
            source = linecache.getline(code.co_filename, number).strip()
            yield f"{Path(code.co_filename).name}:{number}, in {code.co_name}: {source}"
        trace = trace.tb_next
