"""What a step in JAX returns, and what the host does between two steps: decided without an accelerator."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
import pytest

from packages.unisono.tests.jax_programs import Program, engine_of, lower_step, reads, size_in_bytes
from packages.unisono.tests.jax_runs import layout
from packages.unisono.tests.jax_tasks import LinearTask
from packages.unisono.tests.runs import configuration
from unisono.config.schema.run import RunConfig
from unisono.engines.jax.guards import compilation

STEPS = 4


def config(**groups: Any) -> RunConfig:
    given = {"steps": STEPS, "global_batch": 8, "precision": "bf16", **groups.pop("train", {})}
    average = {"decay": 0.9}
    return configuration(
        train=given, observe={"progress": False}, layout=layout(), optim={"kind": "adamw", "lr": 1e-3}, ema=average,
        **groups,
    )  # fmt: skip


@pytest.fixture(scope="module")
def program() -> Program:
    return lower_step(LinearTask(), config())


def test_a_step_returns_its_state_and_one_vector_and_nothing_else(program: Program) -> None:
    """Parameters, their average, two moments and a count of steps; then the outcome, packed."""
    before, *_ = program.given
    after, outcome = program.returned
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), before
    )
    parameters = size_in_bytes(before.parameters)
    assert size_in_bytes(before.average) == parameters
    assert size_in_bytes(before.optimizer) == pytest.approx(2 * parameters, abs=16)
    numbers = 3 + len(before.parameters)  # loss, norm, whether it was made; squares of every gradient
    assert outcome.shape[0] > numbers
    assert size_in_bytes(outcome) <= 4 * (numbers + 16), "each further number is one of a micro-batch's report"


def test_the_whole_state_is_donated(program: Program) -> None:
    """Else the device would hold it twice."""
    state, *others = program.lowered.args_info[0]
    assert all(leaf.donated for leaf in jax.tree.leaves(state))
    assert not any(leaf.donated for leaf in jax.tree.leaves(others))


def test_a_step_makes_the_host_read_one_vector_and_send_the_numbers_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing is traced or compiled after the second step, which the first one's comparison of replicas is before.

    All else that crosses is the batch, which `Batches` copies ahead; what JAX moves of its own accord is refused.
    """
    compiled: Counter[str] = Counter()
    monitored = list[tuple[dict[str, int], dict[tuple[int, ...], int]]]()

    def listen(event: str, duration: float, **_: Any) -> None:
        compiled[event] += "compile" in event

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with engine_of(LinearTask(), config(train={"guard_every": 100})) as (engine, loader, scalars):
            engine.setup(next(iter(loader.steps())), scalars(0))
            inputs = engine.programs.inputs
            monkeypatch.setattr(engine.programs, "inputs", lambda *given: jax.device_put(inputs(*given)))
            monkeypatch.setattr(engine.batches, "spread", allowed(engine.batches.spread))
            for step, batches in enumerate(engine.incoming(loader.steps())):
                compiled.clear()
                with reads(monkeypatch) as seen, jax.transfer_guard("disallow" if step else "allow"):
                    engine.step(batches, step, scalars(step))
                monitored.append((dict(+compiled), dict(seen)))
            sent = jax.tree.leaves(inputs(0, scalars(0), True, {}))
            outcome = 3 + len(engine.held.state.parameters)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(monitored) == STEPS
    for events, seen in monitored[1:]:
        assert events == {}
        assert sum(seen.values()) == 1
        assert all(len(shape) == 1 and shape[0] < outcome + 16 for shape in seen)
    assert len(sent) == 2 and size_in_bytes(sent) < 200
    assert all(isinstance(array, np.ndarray) for array in sent)


def test_what_the_start_of_a_run_compiles_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    named = list[str]()

    def compiling(what: str, shown: bool) -> AbstractContextManager[None]:
        named.append(what)
        assert shown
        return nullcontext()

    monkeypatch.setattr(compilation, "compiling", compiling)
    with engine_of(LinearTask(), config()) as (engine, loader, scalars):
        engine.setup(next(iter(loader.steps())), scalars(0))
    assert named == ["the step"]


def allowed(move: Any) -> Any:
    """A function that may move arrays, in a context in which nothing may."""

    def moving(*given: Any) -> Any:
        with jax.transfer_guard("allow"):
            return move(*given)

    return moving


def test_what_the_host_reads_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would be of no use otherwise."""
    array = jax.numpy.ones((2, 3)) + 1
    with reads(monkeypatch) as seen:
        np.asarray(array)
        float(array.sum())
        array.tolist()
    assert seen == {(2, 3): 2, (): 1}
