"""Which generator of the whole process a piece of code draws from, and the line that drew.

Such draws have no address: what they give depends on which thread comes first, and on what was drawn before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from unisono.runtime.code.source_files import is_user_file


def host_generator_states() -> dict[str, bytes]:
    """The states of Python's and NumPy's generators that all threads share, by name."""
    legacy: Any = np.random.get_state(legacy=False)
    return {
        "Python's random": repr(random.getstate()).encode(),
        "NumPy's global generator": legacy["state"]["key"].tobytes() + legacy["state"]["pos"].to_bytes(4),
    }


def global_generator_states() -> dict[str, bytes]:
    """The state of every generator that all threads share, by name."""
    states = host_generator_states()
    if "torch" in sys.modules:
        states["torch's global generator"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def moved_generators(before: dict[str, bytes]) -> list[str]:
    """Names of the generators whose state is not what it was."""
    return [name for name, state in global_generator_states().items() if name in before and state != before[name]]


def find_drawing_lines(code: Callable[[], Any]) -> dict[str, str]:
    """Run code once more, slowly, to see which of its own lines draw: by generator, the first as `file:line`.

    Args:
        code: that draws. Lines of installed libraries are not its own; an error in it ends the search.
    """
    found: dict[str, str] = {}
    previous, tracer = "", sys.gettrace()
    states = global_generator_states()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal previous, states
        if not is_user_file(frame.f_code.co_filename):
            return None
        for name in moved_generators(states) if previous else ():
            found.setdefault(name, previous)
        states = global_generator_states()
        caller = frame.f_back if event == "return" else None
        at = caller if caller is not None and is_user_file(caller.f_code.co_filename) else frame
        previous = f"{at.f_code.co_filename}:{at.f_lineno}"
        return look

    sys.settrace(look)
    try:
        code()
    except Exception:
        pass  # only what it drew until then matters here
    finally:
        sys.settrace(tracer)
    for name in moved_generators(states) if previous else ():
        found.setdefault(name, previous)
    return found


def describe_draws(generators: list[str], code: Callable[[], Any]) -> str:
    """In words, from which of these generators code draws, and where; empty without generators."""
    if not generators:
        return ""
    lines = find_drawing_lines(code)
    return " and ".join(f"{name} ({lines[name]})" if name in lines else name for name in generators)


@contextmanager
def restore_global_generators() -> Iterator[None]:
    """Restore Python's and NumPy's generators on exit; torch's is an engine's to restore."""
    states = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
