"""Parameters of which every process of a script holds a piece by hand, as parts of a layer or of an embedding.

They are no copies of one another, and what one process has of them is larger: there is nothing to compare them with.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.proof.comparison import ComparedQuantity
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.runtime.text import join_names


def drop_pieces(traces: Sequence[ScriptTrace], reference: ScriptTrace) -> list[str]:
    """Forget the parameters that ranks hold pieces of, in these traces and that of one process; returns their names."""
    found = {name for trace in traces for name in _find_pieces(trace, reference)}
    for trace in (*traces, reference) if found else ():
        _drop(trace, found)
    return sorted(found)


def describe_pieces(names: Sequence[str]) -> ComparedQuantity:
    """That they were not compared."""
    why = f"every rank has a piece of its own of {join_names(names, 3)}, which one process has whole"
    return ComparedQuantity("parameters are whole", "ABSTAIN", why=why)


def _find_pieces(trace: ScriptTrace, reference: ScriptTrace) -> list[str]:
    """Parameters that are shorter than those of one process in one dimension, where not all ranks begin with the same.

    Ranks need not hold equally much: the last one may have the rest, or the parameter be padded. Where they have less
    than all of it together, something was lost, and it is no piece.
    """
    mine, whole = trace.tensors("initial parameters"), reference.tensors("initial parameters")
    names = [n for n in mine if n in whole and _is_part(mine[n].shape, whole[n].shape)]
    apart = {tuple(rank.initial.get(name) for name in names): rank for rank in trace.ranks[0]}  # without their copies
    if len(apart) == 1:
        return []
    return [name for name in names if sum(rank.sizes.get(name, 0) for rank in apart.values()) >= whole[name].size]


def _is_part(part: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    other = [(a, b) for a, b in zip(part, whole, strict=False) if a != b]
    return len(part) == len(whole) and len(other) == 1 and other[0][0] < other[0][1]


def _drop(trace: ScriptTrace, names: set[str]) -> None:
    trace.pieces = frozenset(names)
    facts = trace.facts
    facts.trainable = [name for name in facts.trainable if name not in names]
    facts.frozen = [name for name in facts.frozen if name not in names]
    for step in facts.steps:
        step.grad_norm = None  # of what rank 0 holds
        step.replicas = [said for said in step.replicas if not names & {*said.split("'")[1].split("/")}]
    for rank in (rank for seen in trace.ranks for rank in seen):
        for digests in (rank.initial, rank.begun, rank.clipped):
            for name in names & {*digests}:
                del digests[name]
        rank.parted = True
