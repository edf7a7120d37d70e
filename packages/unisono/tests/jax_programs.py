"""What JAX is given to run: the lowered step of a task, and what the host does between two steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
import pytest

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader
from unisono.data.order.planning import build_plan, build_source
from unisono.engines.jax.engine import JaxEngine, create
from unisono.engines.jax.guards.compilation import Compiler, ProgramKey
from unisono.engines.protocol import EngineJob
from unisono.optim.schedules import ScheduledScalars
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import UnisonoError
from unisono.task import Task

_ARRAY = r"tensor<([^>]*?)x?(bf16|f16|f32|f64|i\w+|ui\w+)>"
_PRODUCT = re.compile(rf"stablehlo\.dot_general.*: \({_ARRAY}, {_ARRAY}\) -> {_ARRAY}")


@dataclass(frozen=True)
class Product:
    """A product of matrices: shapes of both operands and of the result, and the dtypes of all three."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A lowered program, and what it is called with."""

    lowered: Any
    given: tuple[Any, ...]

    @property
    def products(self) -> list[Product]:
        """All products, each once however often a loop repeats it."""
        found = []
        for match in _PRODUCT.finditer(self.lowered.as_text()):
            shapes, dtypes = match.groups()[::2], match.groups()[1::2]
            found.append(Product(tuple(tuple(map(int, filter(None, one.split("x")))) for one in shapes), dtypes))
        return found

    @property
    def operations(self) -> int:
        """How many operations the program has, of which XLA makes its own."""
        return sum(" = " in line for line in self.lowered.as_text().splitlines())

    @property
    def returned(self) -> tuple[Any, Any]:
        """The state and the packed outcome, as shapes; anything else would be an output that nobody asked for."""
        state, outcome = self.lowered.out_info
        return state, outcome


class _LoweredError(UnisonoError):
    """The program is known; nothing needs to be compiled."""


@contextmanager
def engine_of(task: Task, config: RunConfig) -> Iterator[tuple[JaxEngine, Loader, ScheduledScalars]]:
    """An engine on one device, its loader and its schedules; nothing is set up yet."""
    split = BatchSplit.create(config.train.global_batch, 1, config.layout.micro_batch, 1)
    source = build_source(task, config, 1)
    plan = build_plan(task, source, config, 1)
    loader = Loader(task, source, plan, split, 0, on_error=config.data.on_error)
    engine = create(EngineJob(task, config, ProcessInfo(), SingleProcess(), split))
    try:
        yield engine, loader, ScheduledScalars(config, plan.steps)
    finally:
        loader.close()
        engine.close()


def lower_step(task: Task, config: RunConfig) -> Program:
    """The program of a training step as the engine makes it; it is not compiled."""
    found: list[Program] = []

    def lower(self: Compiler, key: ProgramKey, make: Any, arguments: Any) -> Any:
        found.append(Program(make().trace(*arguments).lower(), arguments))
        raise _LoweredError

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(_LoweredError),
        engine_of(task, config) as (engine, loader, scalars),
    ):
        patch.setattr(Compiler, "_compile", lower)
        engine.setup(next(iter(loader.steps())), scalars(0))
    return found[0]


def size_in_bytes(tree: Any) -> int:
    """Of all arrays of a tree."""
    return sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


@contextmanager
def reads(patch: pytest.MonkeyPatch) -> Iterator[Counter[tuple[int, ...]]]:
    """A context that counts, by shape, the arrays of devices whose content the host asks for."""
    found: Counter[tuple[int, ...]] = Counter()
    kind = type(jax.numpy.zeros(1))
    value, asarray, array = kind._value, np.asarray, np.array

    def counting(read: Any) -> Any:
        def count(given: Any, *arguments: Any, **named: Any) -> Any:
            if isinstance(given, jax.Array):
                found[given.shape] += 1
            return read(given, *arguments, **named)

        return count

    with patch.context() as here:
        here.setattr(np, "asarray", counting(asarray))
        here.setattr(np, "array", counting(array))
        here.setattr(kind, "_value", property(counting(value.fget)))
        yield found
