"""The same faults in a run in JAX: rows of other modules, with the small task in JAX. Their keys end in `j`."""

from __future__ import annotations

from unisono.faults.matrix import SCENARIOS, Outcome, Sandbox, scenario
from unisono.faults.scenarios import death, network, storage  # noqa: F401 - their rows are taken over
from unisono.faults.scenarios.kills import kill_rank


def _add(key: str, *, quick: bool = False) -> None:
    """A row of the matrix as it is in torch."""
    row = SCENARIOS[key]

    @scenario(f"{key}j", f"JAX: {row.text}", quick=quick)
    def _act(sandbox: Sandbox) -> Outcome:
        return row.act(sandbox.in_jax())


_add("A1", quick=True)
for _key in ("A5", "A9", "B10", "B12", "B13", "F42", "C20", "C24", "C27"):
    _add(_key)


@scenario("A4j", "JAX: kill -9 of rank 0 at random instants")
def _first(sandbox: Sandbox) -> Outcome:
    return kill_rank(sandbox.in_jax(), 0)


@scenario("A4k", "JAX: kill -9 of rank 1 at random instants")
def _second(sandbox: Sandbox) -> Outcome:
    return kill_rank(sandbox.in_jax(), 1)
