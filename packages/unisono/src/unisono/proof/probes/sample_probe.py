"""Does `sample`, and `collate`, give the same for the same rows: a second time, and after other rows were read?"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.loading.checksum import checksum
from unisono.data.loading.draws import restore_global_generators
from unisono.data.order.plan import SampleIndices
from unisono.proof.probes.state import describe_state, digest_attributes
from unisono.runtime.text import join_names
from unisono.task import SampleContext, Source, Task, run_setup


def digest_samples(
    task: Task, source: Source, seed: int, indices: SampleIndices, mask: bool = False
) -> list[list[int]]:
    """Digests of every sample, and of the generator that it was given; of a task that stays as it is.

    Args:
        task: whose `sample` is called.
        source: its rows.
        seed: of the run.
        indices: which samples.
        mask: leave those out that cannot be made.
    """
    generators: list[int] = []
    one = copy.copy(task)
    original = one.sample

    def sample(record: Any, context: SampleContext) -> Any:
        generators.append(checksum(repr(context.rng.bit_generator.state)))
        return original(record, context)

    one.__dict__["sample"] = sample
    with restore_global_generators():
        builder = BatchBuilder(one, source, seed, "train", mask=mask, together=False)
        made = [checksum(piece) for piece in builder.pieces(indices)[1]]
    return [list(pair) for pair in zip(made, generators, strict=False)]


def probe_samples(
    task: Task, source: Source, seed: int, indices: SampleIndices, mask: bool = False, packed: bool = False
) -> str:
    """Make samples twice, then in reversed order by a task that has made them for another epoch; and their batch twice.

    Args:
        task: whose functions are tried, best as it was before it made anything; copies of it are used.
        source: its rows.
        seed: of the run.
        indices: which samples.
        mask: leave those out that cannot be made.
        packed: whether samples share rows, so that they are no batch as they are.

    Returns:
        Why samples or batches come out otherwise, empty if they do not.
    """
    used, fresh = copy.copy(task), copy.copy(task)
    for one in (used, fresh):
        run_setup(one)
    own, other = (BatchBuilder(one, source, seed, "train", mask=mask) for one in (used, fresh))
    with restore_global_generators():
        if why := _find_overwritten(used, own, indices):
            return why
        once = [checksum(sample) for sample in own.pieces(indices)[1]]
        samples = own.pieces(indices)[1]
        rows = indices.rows.tolist()
        for place, (a, b) in enumerate(zip(once, map(checksum, samples), strict=False)):
            if a != b:
                row, single = rows[place], partial(own.pieces, indices[place : place + 1])
                why = describe_state(used, single, source[row], seeded=())
                return f"sample() of row {row} came out otherwise the second time; {why}"
        turned_indices = indices[::-1]
        other.pieces(replace(turned_indices, epochs=turned_indices.epochs + 1))  # a cache would keep these
        turned = [checksum(sample) for sample in other.pieces(turned_indices)[1]][::-1]
        for row, a, b in zip(rows, once, turned, strict=False):
            if a != b:
                before = "where other rows, or the same one for another epoch, were read before it"
                return f"sample() of row {row} comes out otherwise {before}"
        return "" if packed or not samples else _collate_twice(used, samples)


def _find_overwritten(task: Task, builder: BatchBuilder, indices: SampleIndices) -> str:
    """Which array of a sample the next one is written into, and the attribute whose memory it is; empty for none."""
    if len(indices) < 2:
        return ""
    first = builder.pieces(indices[:1])[1]
    before = [checksum(sample) for sample in first]
    builder.pieces(indices[1:2])
    if [checksum(sample) for sample in first] == before:
        return ""
    arrays = [value for sample in first for value in (sample.values() if isinstance(sample, Mapping) else [sample])]
    holders = [f"self.{name}" for name, value in vars(task).items() if any(_share_memory(value, a) for a in arrays)]
    where = f", which is memory of {join_names(holders)}" if holders else ""
    return f"sample() changes the sample of a row when it makes the next one{where}: return a copy"


def _collate_twice(task: Task, samples: Sequence[Any]) -> str:
    shortest = min(samples, key=_measure)
    attributes, alone = digest_attributes(task), _digest_alone(task, shortest)
    first, second = task.collate(list(samples)), task.collate(list(samples))
    different = [name for name in first if checksum(first[name]) != checksum(second.get(name))]
    if different:
        why = describe_state(task, lambda: task.collate(list(samples)), list(samples), seeded=())
        return f"collate() of the same samples gave another '{different[0]}' the second time; {why}"
    if why := _find_reused(task, samples):
        return why
    again = _digest_alone(task, shortest)
    if different := [name for name in alone if again.get(name, alone[name]) != alone[name]]:
        kept = [f"self.{n}" for n, digest in digest_attributes(task).items() if digest != attributes.get(n)]
        why = f"it changes {join_names(kept)}" if kept else "what it keeps is not known"
        return f"collate() of a sample alone gives another '{different[0]}' after it was given others; {why}"
    return ""


def _digest_alone(task: Task, sample: Any) -> dict[str, int]:
    """Digests of the arrays that one sample is collated to, by name; empty where it needs several."""
    try:
        return {name: checksum(value) for name, value in task.collate([sample]).items()}
    except Exception:
        return {}


def _measure(sample: Any) -> int:
    """Bytes of a sample, which may be a tensor, an image, or ragged; 0 of what has no bytes."""
    try:
        return len(pickle.dumps(sample))
    except Exception:
        return 0


def _find_reused(task: Task, samples: Sequence[Any]) -> str:
    """Which array of a batch the next batch is written into, and the attribute whose memory it is; empty for none."""
    batch = task.collate(list(samples))
    before = {name: checksum(value) for name, value in batch.items()}
    task.collate([*samples[1:], *samples[:1]])
    changed = [name for name, value in batch.items() if checksum(value) != before[name]]
    if not changed:
        return ""
    holders = [f"self.{name}" for name, value in vars(task).items() if _share_memory(value, batch[changed[0]])]
    where = f", which is memory of {join_names(holders)}" if holders else ""
    return f"collate() changes '{changed[0]}' of a batch when it makes the next one{where}: return a copy"


def _share_memory(one: Any, other: Any) -> bool:
    known = hasattr(one, "__array__") and hasattr(other, "__array__")
    return known and bool(np.may_share_memory(np.asarray(one), np.asarray(other)))
