"""Generators that a script does not seed: else two starts would draw other numbers, and nothing could be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch

from unisono.proof.scripts.recording.model_facts import name_generators

_SEED = 20_261_128


class Seeds:
    """Seeds all generators of a process by its rank, as unseeded ones would differ, and sees whether the script does.

    Args:
        rank: of the process.
    """

    def __init__(self, rank: int) -> None:
        self._seed = _SEED + rank
        self._seeded: set[str] = set()
        self._begun: dict[str, int] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While the script runs."""
        random.seed(self._seed)
        np.random.seed(self._seed)
        torch.manual_seed(self._seed)
        self._begun = name_generators()
        watched: list[tuple[Any, str, str]] = [
            *((random, name, "python") for name in ("seed", "setstate")),
            *((np.random, name, "numpy") for name in ("seed", "set_state")),
            *((torch, name, "torch") for name in ("manual_seed", "set_rng_state")),
            *((torch.random, name, "torch") for name in ("manual_seed", "set_rng_state")),
        ]
        with ExitStack() as stack:
            for home, name, kind in watched:
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, self._watch(getattr(home, name), kind))
            yield

    def find_unseeded(self) -> list[str]:
        """The generators from which the script has drawn without a seed of its own."""
        now = name_generators()
        return sorted(name for name, state in self._begun.items() if now[name] != state and name not in self._seeded)

    def _watch(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @wraps(original)
        def seed(*args: Any, **named: Any) -> Any:
            self._seeded.add(kind)
            return original(*args, **named)

        return seed


def describe_unseeded(names: list[str]) -> str:
    """For the report; empty if there are none."""
    shown = {"torch": "torch", "python": "Python's random", "numpy": "NumPy"}
    if not names:
        return ""
    return f"not seeded by the script, so seeded by rank for the proof: {', '.join(shown[name] for name in names)}"
